"""The judge of progress: what is stalled, when it is healed, and when the replica is at fault."""

from cluster.progress import BASE, MOST_HEALS, RELAPSE_DEADLINES, Deadlines, ProgressWatch, Sign, signs
from lora_core.workload import AdapterWork

DEADLINES = Deadlines(adapter_s=10, waiting_s=30, replica_s=20)


def test_what_moves_is_not_stalled() -> None:
    watch = ProgressWatch(DEADLINES)
    verdict = watch.judge(100, {"a": Sign(9.9), "b": Sign(29, waits=True), BASE: Sign(0)})
    assert verdict == ({}, (), None)


def test_an_adapter_past_its_deadline_is_stalled_until_its_requests_are_gone() -> None:
    watch = ProgressWatch(DEADLINES)
    verdict = watch.judge(100, {"a": Sign(10.5), "b": Sign(0)})
    assert verdict.to_heal == ("a",)
    assert "'a'" in verdict.adapters["a"]
    assert "10.5 s" in verdict.adapters["a"]
    assert "watchdog.adapter_deadline_s is 10" in verdict.adapters["a"]
    again = watch.judge(101, {"a": Sign(11.5), "b": Sign(0)})
    assert (set(again.adapters), again.to_heal) == ({"a"}, ())
    assert watch.judge(102, {"b": Sign(0)}) == ({}, (), None)


def test_a_request_that_came_after_the_heal_began_does_not_keep_an_adapter_out() -> None:
    watch = ProgressWatch(DEADLINES)
    watch.judge(100, {"a": Sign(11), "b": Sign(0)})
    assert watch.judge(103, {"a": Sign(2), "b": Sign(0)}).adapters == {}


def test_who_waits_has_a_deadline_of_its_own() -> None:
    watch = ProgressWatch(DEADLINES)
    assert watch.judge(0, {"a": Sign(25, waits=True), "b": Sign(1)}).to_heal == ()
    verdict = watch.judge(6, {"a": Sign(31, waits=True), "b": Sign(1)})
    assert verdict.to_heal == ("a",)
    assert "watchdog.waiting_deadline_s is 30" in verdict.adapters["a"]


def test_the_base_model_is_named_as_such() -> None:
    verdict = ProgressWatch(DEADLINES).judge(0, {BASE: Sign(11), "a": Sign(0)})
    assert verdict.to_heal == (BASE,)
    assert verdict.adapters[BASE].startswith("the base model: ")


def test_a_replica_where_nothing_moves_is_stalled_and_stays_so() -> None:
    watch = ProgressWatch(DEADLINES)
    verdict = watch.judge(0, {"a": Sign(21), "b": Sign(22, waits=True)})
    assert verdict.replica is not None
    assert "no request has made progress for 21.0 s" in verdict.replica
    assert verdict.to_heal == ()
    assert watch.judge(1, {}).replica == verdict.replica


def test_a_replica_without_requests_is_not_stalled() -> None:
    assert ProgressWatch(DEADLINES).judge(1000, {}) == ({}, (), None)


def test_an_adapter_that_stalls_again_and_again_is_the_replicas_fault() -> None:
    watch, now = ProgressWatch(DEADLINES), 0.0
    for _ in range(MOST_HEALS):
        now += 12
        assert watch.judge(now, {"a": Sign(11), "b": Sign(0)}).to_heal == ("a",)
        now += 1
        assert watch.judge(now, {"b": Sign(0)}).replica is None
    verdict = watch.judge(now + 12, {"a": Sign(11), "b": Sign(0)})
    assert verdict.replica is not None
    assert "'a'" in verdict.replica
    assert verdict.to_heal == ()


def test_heals_of_long_ago_do_not_count() -> None:
    watch, now = ProgressWatch(DEADLINES), 0.0
    for _ in range(3 * MOST_HEALS):
        now += RELAPSE_DEADLINES * DEADLINES.adapter_s + 1
        assert watch.judge(now, {"a": Sign(11), "b": Sign(0)}).to_heal == ("a",)
        watch.judge(now + 0.25, {"b": Sign(0)})


def test_a_heal_that_does_not_help_is_the_replicas_fault() -> None:
    watch = ProgressWatch(DEADLINES)
    watch.judge(0, {"a": Sign(11), "b": Sign(0)})
    assert watch.judge(20, {"a": Sign(31), "b": Sign(0)}).replica is None
    verdict = watch.judge(20.5, {"a": Sign(31.5), "b": Sign(0)})
    assert verdict.replica is not None
    assert "did not help within 20 s" in verdict.replica


def test_a_request_the_engine_computes_lives_though_no_token_came() -> None:
    work = {"a": AdapterWork(name="a", num_running=1, oldest_idle_s=0.1)}
    assert signs({"a": 50.0}, work) == {"a": Sign(0.1)}


def test_a_request_the_engine_does_not_know_is_judged_by_the_replica_alone() -> None:
    assert signs({"a": 50.0}, {"a": AdapterWork(name="a", num_tokens=9)}) == {"a": Sign(50.0)}


def test_a_request_nobody_waits_for_is_judged_by_the_engine_alone() -> None:
    work = {"a": AdapterWork(name="a", num_waiting=2, oldest_idle_s=7.0)}
    assert signs({}, work) == {"a": Sign(7.0, waits=True)}


def test_one_that_waits_while_newer_ones_run_is_judged_as_one_that_waits() -> None:
    work = {"a": AdapterWork(name="a", num_running=3, num_waiting=1, oldest_idle_s=11.0, oldest_waits=True)}
    found = signs({"a": 11.0}, work)
    assert found == {"a": Sign(11.0, waits=True)}
    assert ProgressWatch(DEADLINES).judge(0, found).to_heal == ()


def test_tokens_count_where_the_engines_word_is_old() -> None:
    work = {"a": AdapterWork(name="a", num_running=1, oldest_idle_s=12.0)}
    assert signs({"a": 0.25}, work) == {"a": Sign(0.25)}
