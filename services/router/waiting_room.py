"""Requests of one model that wait for a worker to have room: who may wait, and whose turn it is. Pure.

    classes   a higher priority goes first, always: a class that never ends starves those below it. That is what
              strict priority means; give it to little, urgent work.
    tenants   in a class they take turns by deficit round robin over uncached prompt tokens, so none can starve another,
              however much it sends: of two that always wait, each gets the same tokens to within a quantum and the
              longest request.
    bounds    of requests and of tokens. A newcomer that finds the room full displaces waiting requests of lower
              classes, newest first; else the newest of the tenant in its own class that takes up most, if that one
              still has no less than the newcomer's tenant then. Otherwise it is refused.
    deadlines a newcomer whose turn is expected after its deadline is refused at once.

Work that runs is never displaced.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from controlplane.errors import DeadlineExceeded, Overloaded
from services.router.drain_rate import DrainRate

__all__ = ["ANYWHERE", "Ticket", "WaitingRoom"]

QUANTUM_TOKENS = 2048
"""What a tenant may place in one turn: some short prompts, or a part of a long one."""
LEAST_TOKENS = 16
"""What a request counts at least: one that is wholly cached is work, too."""
LEAST_RETRY_S, MOST_RETRY_S = 0.5, 30.0
ANYWHERE: Hashable = ()
"""The `where` of a request that any worker of the model can serve."""


@dataclass(eq=False, slots=True, kw_only=True)
class Ticket:
    """A request that waits."""

    priority: int
    tenant: str
    tokens: int
    """Prompt tokens that its worker has to compute."""
    where: Hashable = ANYWHERE
    """Requests for which equal workers come into question have an equal one."""
    deadline: float = float("inf")
    entered_at: float = field(default=0.0, init=False)


T = TypeVar("T", bound=Ticket)


@dataclass(slots=True)
class _Tenant(Generic[T]):
    tickets: dict[T, None] = field(default_factory=dict)
    """In the order of their coming."""
    tokens: int = 0
    deficit: int = 0
    """Tokens it may still place in this round."""

    def first(self, full: Collection[Hashable]) -> T | None:
        return next((ticket for ticket in self.tickets if ticket.where not in full), None)


@dataclass(slots=True)
class _Class(Generic[T]):
    tickets: dict[T, None] = field(default_factory=dict)
    """In the order of their coming."""
    tenants: dict[str, _Tenant[T]] = field(default_factory=dict)
    """In the order of their turns."""
    tokens: int = 0


class WaitingRoom(Generic[T]):
    """Owns the order of what waits. Times are a monotonic clock's, passed in."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._classes: dict[int, _Class[T]] = {}
        """By priority; none is empty."""
        self._rate = DrainRate()
        self._requests = 0
        self._tokens = 0

    def __len__(self) -> int:
        """Requests that wait."""
        return self._requests

    def __contains__(self, ticket: T) -> bool:
        """Whether it waits here."""
        its_class = self._classes.get(ticket.priority)
        return its_class is not None and ticket in its_class.tickets

    @property
    def tokens(self) -> int:
        """Of all that wait."""
        return self._tokens

    @property
    def waiting(self) -> Mapping[int, int]:
        """Requests by priority."""
        return {priority: len(one.tickets) for priority, one in self._classes.items()}

    def enter(self, ticket: T, now: float) -> list[T]:
        """Lets it wait, and returns those that had to go for it.

        Raises `Overloaded` (full) or `DeadlineExceeded` (hopeless), with a hint when to try again; nothing changes.
        A prompt longer than `max_tokens` counts as so many: it may wait, though alone.
        """
        ticket.tokens = min(max(ticket.tokens, LEAST_TOKENS), self._max_tokens)
        self._refuse_hopeless(ticket, now)
        displaced = self._make_room(ticket, now)
        for one in displaced:
            self.leave(one, now)
        self._rate.advance(now, waiting=bool(self._requests))
        ticket.entered_at = now
        its_class = self._classes.setdefault(ticket.priority, _Class())
        tenant = its_class.tenants.setdefault(ticket.tenant, _Tenant())
        its_class.tickets[ticket] = tenant.tickets[ticket] = None
        self._count(ticket, its_class, tenant, 1)
        return displaced

    def next(self, full: Collection[Hashable] = ()) -> T | None:
        """Whose turn it is among those whose `where` is not in `full`. It stays until `take` or `leave`."""
        if ANYWHERE in full:
            return None
        for priority in sorted(self._classes, reverse=True):
            if (ticket := _whose_turn(self._classes[priority], full)) is not None:
                return ticket
        return None

    def take(self, ticket: T, now: float) -> None:
        """It was placed: its tenant pays for it."""
        its_class = self._classes[ticket.priority]
        tenant = its_class.tenants[ticket.tenant]
        tenant.deficit -= ticket.tokens
        self.leave(ticket, now)
        self._rate.placed(ticket.tokens)
        if (following := next(iter(tenant.tickets), None)) is not None and following.tokens > tenant.deficit:
            its_class.tenants[ticket.tenant] = its_class.tenants.pop(ticket.tenant)  # the next one's turn

    def leave(self, ticket: T, now: float) -> None:
        """It is not to be placed any more. Nothing happens where it does not wait."""
        if ticket not in self:
            return
        self._rate.advance(now, waiting=True)
        its_class = self._classes[ticket.priority]
        tenant = its_class.tenants[ticket.tenant]
        del its_class.tickets[ticket], tenant.tickets[ticket]
        self._count(ticket, its_class, tenant, -1)
        if not tenant.tickets:
            del its_class.tenants[ticket.tenant]  # and its deficit: turns are not saved up
        if not its_class.tickets:
            del self._classes[ticket.priority]

    def expected_wait_s(self, ticket: T, now: float) -> float | None:
        """Until a newcomer's turn, by how fast the room has emptied lately; None: it cannot be told yet.

        Before it go all higher classes, and of each tenant of its own class as many tokens as its own tenant has.
        """
        self._rate.advance(now, waiting=bool(self._requests))
        ahead = sum(one.tokens for priority, one in self._classes.items() if priority > ticket.priority)
        if (its_class := self._classes.get(ticket.priority)) is not None:
            own = its_class.tenants.get(ticket.tenant)
            until = ticket.tokens + (own.tokens if own is not None else 0)
            ahead += sum(min(tenant.tokens, until) for tenant in its_class.tenants.values())
        return self._rate.seconds_for(ahead)

    def seconds_each(self, now: float) -> float | None:
        """From one placement to the next lately; None: it cannot be told."""
        self._rate.advance(now, waiting=bool(self._requests))
        return self._rate.seconds_each()

    def retry_after_s(self, now: float) -> float:
        """Advice to one that is refused: when what waits now is expected to be placed."""
        self._rate.advance(now, waiting=bool(self._requests))
        seconds = self._rate.seconds_for(self._tokens)
        return 1.0 if seconds is None else min(max(seconds, LEAST_RETRY_S), MOST_RETRY_S)

    def _refuse_hopeless(self, ticket: T, now: float) -> None:
        expected = self.expected_wait_s(ticket, now)
        if expected is not None and now + expected > ticket.deadline:
            raise DeadlineExceeded(
                f"every worker is full and a turn is expected in {expected:.1f} s, but the time allowed for this"
                f" request ends in {max(ticket.deadline - now, 0):.1f} s",
                param="timeout_ms",
                retry_after_s=self.retry_after_s(now),
            )

    def _make_room(self, ticket: T, now: float) -> list[T]:
        """Who has to go. Raises `Overloaded`."""
        displaced: list[T] = []
        requests, tokens = self._requests + 1 - self._max_requests, self._tokens + ticket.tokens - self._max_tokens
        victims = self._victims(ticket)
        while requests > 0 or tokens > 0:
            victim = next(victims, None)
            if victim is None:
                raise Overloaded(
                    f"every worker is full, and {self._requests} requests with {self._tokens} uncached tokens wait"
                    f" already, of {self._max_requests} and {self._max_tokens} that may; try again later",
                    retry_after_s=self.retry_after_s(now),
                )
            displaced.append(victim)
            requests, tokens = requests - 1, tokens - victim.tokens
        return displaced

    def _victims(self, newcomer: T) -> Iterator[T]:
        for priority in sorted(self._classes):
            if priority < newcomer.priority:
                yield from reversed(self._classes[priority].tickets)
        if (its_class := self._classes.get(newcomer.priority)) is None:
            return
        left = {name: (len(one.tickets), one.tokens) for name, one in its_class.tenants.items()}
        own_requests, own_tokens = left.pop(newcomer.tenant, (0, 0))
        own = self._share(own_requests + 1, own_tokens + newcomer.tokens)
        newest = {name: reversed(its_class.tenants[name].tickets) for name in left}
        while left:
            name = max(left, key=lambda one: self._share(*left[one]))
            victim = next(newest[name])
            requests, tokens = left[name] = left[name][0] - 1, left[name][1] - victim.tokens
            if self._share(requests, tokens) < own:
                return
            yield victim

    def _share(self, requests: int, tokens: int) -> float:
        return max(requests / self._max_requests, tokens / self._max_tokens)

    def _count(self, ticket: T, its_class: _Class[T], tenant: _Tenant[T], sign: int) -> None:
        self._requests += sign
        self._tokens += sign * ticket.tokens
        its_class.tokens += sign * ticket.tokens
        tenant.tokens += sign * ticket.tokens


def _whose_turn(one_class: _Class[T], full: Collection[Hashable]) -> T | None:
    """The first tenant, in turn, that can pay for its first request; rounds are granted until one can."""
    short: list[tuple[_Tenant[T], T]] = []
    for tenant in one_class.tenants.values():
        if (ticket := tenant.first(full)) is not None:
            if tenant.deficit >= ticket.tokens:
                return ticket
            short.append((tenant, ticket))
    if not short:
        return None
    rounds = min(-((tenant.deficit - ticket.tokens) // QUANTUM_TOKENS) for tenant, ticket in short)
    for tenant, _ in short:
        tenant.deficit += rounds * QUANTUM_TOKENS
    return next(ticket for tenant, ticket in short if tenant.deficit >= ticket.tokens)
