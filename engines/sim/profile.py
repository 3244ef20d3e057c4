"""How long a step takes. A profile is one line of constants; a step's time is their sum over what it computes."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.errors import SettingsError

__all__ = ["PROFILES", "Profile", "profile"]


@dataclass(frozen=True, slots=True)
class Profile:
    """Microseconds; linear, as measured step times nearly are between the extremes."""

    step_us: float
    """Each step: launch, sampling, the weights read once."""
    prefill_us: float
    """Each prompt token computed."""
    decode_us: float
    """Each sequence that decodes."""
    context_us: float
    """Each token of context that a decoding sequence attends to."""

    def step_s(self, prefill_tokens: int, decoding: int, context_tokens: int) -> float:
        """Seconds for one step."""
        return 1e-6 * (
            self.step_us
            + self.prefill_us * prefill_tokens
            + self.decode_us * decoding
            + self.context_us * context_tokens
        )


PROFILES = {
    # Public orders of magnitude for vLLM in bf16: 25k prompt tokens/s and 8 ms a step on an H100 for an 8B model.
    "h100-8b": Profile(step_us=7_500, prefill_us=40, decode_us=15, context_us=0.006),
    "h100-70b-tp4": Profile(step_us=19_000, prefill_us=130, decode_us=25, context_us=0.012),
    "cpu-135m": Profile(step_us=40_000, prefill_us=1_900, decode_us=700, context_us=0.5),
}
"""Starting points, not measurements of a machine of yours."""


def profile(name: str) -> Profile:
    """The profile of that name. Raises `SettingsError`."""
    if name not in PROFILES:
        raise SettingsError(f"profile is {name!r}; it must be one of {', '.join(PROFILES)}", param="profile")
    return PROFILES[name]
