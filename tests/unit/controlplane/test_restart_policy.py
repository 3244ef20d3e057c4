from controlplane.restart_policy import RestartPolicy


def test_delays_double_up_to_the_longest() -> None:
    policy = RestartPolicy(first_delay_s=0.5, longest_delay_s=3.0)
    policy.ready()
    assert [policy.delay_after(1, lived_s=1) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_long_life_starts_the_count_anew() -> None:
    policy = RestartPolicy(first_delay_s=0.5)
    assert policy.delay_after(-9, lived_s=1) == 0.5
    assert policy.delay_after(-9, lived_s=1) == 1.0
    assert policy.delay_after(-9, lived_s=3600) == 0.5


def test_a_child_that_was_never_ready_is_given_up_after_its_attempts() -> None:
    policy = RestartPolicy(attempts=3)
    assert policy.delay_after(1, lived_s=1) is not None
    assert policy.delay_after(1, lived_s=1) is not None
    assert policy.delay_after(1, lived_s=1) is None


def test_wrong_settings_are_given_up_at_once() -> None:
    assert RestartPolicy().delay_after(2, lived_s=1) is None


def test_a_child_that_was_ready_once_is_never_given_up() -> None:
    policy = RestartPolicy(attempts=2)
    policy.ready()
    assert all(policy.delay_after(2, lived_s=1) is not None for _ in range(5000))
