from itertools import islice

from cli.chaos.asks import LONG_ANSWERS, MIXED, Face, asks


def test_the_same_seed_asks_the_same_questions() -> None:
    one, two, three = (list(islice(asks(seed, MIXED), 50)) for seed in (1, 1, 2))
    assert one == two
    assert one != three


def test_every_face_length_and_way_to_go_is_in_the_mix() -> None:
    several = list(islice(asks(1, MIXED), 500))
    assert {ask.face for ask in several} == set(Face)
    assert any(ask.hasty for ask in several)
    assert any(ask.hang_up_after_s is not None for ask in several)
    assert any(not ask.stream for ask in several)
    assert all(ask.stream for ask in several if ask.face in (Face.GRPC, Face.GRPC_CHAT))
    assert len({ask.prompt[:200] for ask in several if len(ask.prompt) > 2000}) <= 6, "long beginnings are shared"


def test_long_streams_neither_hang_up_nor_hurry() -> None:
    several = list(islice(asks(1, LONG_ANSWERS), 200))
    assert all(ask.stream and not ask.hasty and ask.hang_up_after_s is None for ask in several)
    assert min(ask.max_tokens for ask in several) >= 300
