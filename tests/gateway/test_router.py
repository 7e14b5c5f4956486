from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pytest

from headrace.gateway.router import Candidate, Condition, Sight, Turns, choose, pick


def blind(one: Candidate) -> Sight:
    return Sight()


def never(one: Candidate) -> Sight:
    raise AssertionError("there is nothing to choose within the family")


def engine(name: str, **more: object) -> Candidate:
    return Candidate(name, **{"family": name, "weight": 1.0, **more})  # type: ignore[arg-type]


# --- turns


@pytest.mark.parametrize(
    "weights", [{"a": 90.0, "b": 10.0}, {"a": 5.0, "b": 1.0, "c": 1.0}, {"a": 0.1, "b": 0.2, "c": 0.7}, {"a": 1.0}]
)
def test_shares_are_exact_over_each_round(weights: dict[str, float]) -> None:
    turns = Turns()
    total = sum(Fraction(str(weight)) for weight in weights.values())
    length = (total * 10).numerator if total == 1 else int(total)
    for _ in range(3):
        got = Counter(turns.next(weights) for _ in range(length))
        assert got == {family: Fraction(str(weight)) / total * length for family, weight in weights.items()}


def test_turns_are_spread_evenly() -> None:
    turns = Turns()
    assert "".join(turns.next({"a": 5.0, "b": 1.0, "c": 1.0}) for _ in range(7)) == "aabacaa"


def test_any_stretch_is_within_one_turn_of_its_share() -> None:
    """For two families: nobody is ever a whole turn ahead or behind."""
    dice = random.Random(7)
    for _ in range(50):
        weights = {"a": dice.uniform(0.01, 100), "b": dice.uniform(0.01, 100)}
        turns, got = Turns(), Counter[str]()
        for n in range(1, 300):
            got[turns.next(weights)] += 1
            for family, weight in weights.items():
                assert abs(got[family] - n * weight / sum(weights.values())) < 1 + n * 1e-6


def test_a_tiny_weight_gets_its_turn_in_the_end() -> None:
    turns = Turns()
    got = Counter(turns.next({"a": 1.0, "b": 0.0001}) for _ in range(10001))
    assert got["b"] == 1


def test_weights_of_nothing_are_equal() -> None:
    turns = Turns()
    assert Counter(turns.next({"a": 0.0, "b": 0.0}) for _ in range(10)) == {"a": 5, "b": 5}


def test_who_comes_back_does_not_get_what_it_missed() -> None:
    turns = Turns()
    for _ in range(100):
        turns.next({"a": 1.0})
    got = Counter(turns.next({"a": 1.0, "b": 1.0}) for _ in range(10))
    assert got == {"a": 5, "b": 5}


# --- who may be chosen at all


def test_nobody_is_nobody() -> None:
    assert choose([], Turns(), never) is None


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([engine("a"), engine("b", weight=0.0)], "a"),
        ([engine("a", condition=Condition.DOWN), engine("b", weight=0.0)], "b"),
        ([engine("a", condition=Condition.DOWN), engine("b", condition=Condition.FAILING)], "a"),
        ([engine("a", condition=Condition.RESTARTING), engine("b", condition=Condition.DOWN)], "a"),
        ([engine("a", condition=Condition.FAILING), engine("b", condition=Condition.DOWN, weight=0.0)], "b"),
        ([engine("a", weight=0.0)], "a"),
        ([engine("a", weight=0.0, condition=Condition.FAILING)], "a"),
    ],
)
def test_the_healthiest_then_those_with_a_weight(candidates: Sequence[Candidate], expected: str) -> None:
    for _ in range(3):
        chosen = choose(candidates, Turns(), never)
        assert chosen is not None
        assert chosen.name == expected


def test_weights_of_one_family_add_up() -> None:
    candidates = [engine("a", family="f"), engine("b", family="f"), engine("c", family="g")]
    turns = Turns()
    got = Counter((choose(candidates, turns, blind) or candidates[0]).family for _ in range(300))
    assert got == {"f": 200, "g": 100}


# --- within a family


def family(*names: str, **more: object) -> list[Candidate]:
    return [engine(name, family="f", **more) for name in names]


@pytest.mark.parametrize(
    ("sights", "expected"),
    [
        # The longest prefix, however long the queue is, …
        ({"a": Sight(0.2, 0.5), "b": Sight(0.9, 0.55)}, "b"),
        ({"a": Sight(), "b": Sight(0.5, 0.0)}, "b"),
        # … unless it would be later by more than the margin: 0.1 s and a third.
        ({"a": Sight(0.0, 0.5), "b": Sight(0.9, 0.74)}, "b"),
        ({"a": Sight(0.0, 0.5), "b": Sight(0.9, 0.76)}, "a"),
        ({"a": Sight(0.3, 0.5), "b": Sight(0.9, 5.0)}, "a"),
        # A prefix that is hardly one does not count.
        ({"a": Sight(0.0, 0.1), "b": Sight(0.04, 0.2)}, "a"),
        # Without prefixes the soonest, …
        ({"a": Sight(0.0, 0.9), "b": Sight(0.0, 0.2)}, "b"),
        # … and who is not known gets the chance to be.
        ({"a": Sight(0.0, 0.0), "b": Sight(0.0, 0.2)}, "a"),
    ],
)
def test_prefix_then_time(sights: dict[str, Sight], expected: str) -> None:
    for order in (("a", "b"), ("b", "a")):
        assert pick(family(*order), lambda one: sights[one.name]).name == expected


def test_then_the_least_load() -> None:
    members = [engine("a", in_flight=2), engine("b", in_flight=1), engine("c", in_flight=3)]
    assert pick(members, blind).name == "b"
    near = {"a": Sight(0.0, 0.2), "b": Sight(0.0, 0.21), "c": Sight(0.0, 0.2)}
    assert pick(members, lambda one: near[one.name]).name == "b", "that is no difference"
    warm = {"a": Sight(0.5), "b": Sight(0.0), "c": Sight(0.5)}
    assert pick(members, lambda one: warm[one.name]).name == "a", "of those with the prefix"


def test_a_prefix_that_everybody_has_does_not_fill_one_engine() -> None:
    load, warm = Counter[str](), {"a"}
    for _ in range(60):
        members = [engine(name, family="f", in_flight=load[name]) for name in "ab"]
        name = pick(members, lambda one: Sight(1.0 if one.name in warm else 0.0)).name
        load[name] += 1
        warm.add(name)
        if sum(load.values()) <= 9:
            assert warm == {"a"}, "as long as it has room"
    assert load["a"] == load["b"] == 30


def test_not_everybody_runs_to_the_one_that_was_the_fastest_a_moment_ago() -> None:
    """Requests that come at once: an engine twice as fast has twice as many of them, not all."""
    ttft, load = {"a": 0.2, "b": 0.4}, Counter[str]()
    for _ in range(30):
        members = [engine(name, family="f", in_flight=load[name]) for name in "ab"]
        load[pick(members, lambda one: Sight(0.0, ttft[one.name])).name] += 1
    assert load["a"] == pytest.approx(20, abs=2)


def test_then_who_was_not_chosen_for_longest() -> None:
    assert pick([engine("a", last=7), engine("b", last=3), engine("c", last=5)], blind).name == "b"


def test_equal_engines_are_used_equally() -> None:
    load, last = Counter[str](), Counter[str]()
    for n in range(1, 31):
        members = [engine(name, family="f", in_flight=load[name], last=last[name]) for name in "abc"]
        name = pick(members, blind).name
        load[name] += 1
        last[name] = n
        assert max(load[x] for x in "abc") - min(load[x] for x in "abc") <= 1


def test_what_is_chosen_is_a_candidate_of_the_best_condition() -> None:
    dice = random.Random(3)
    for _ in range(500):
        candidates = [
            Candidate(
                str(i), dice.choice("fg"), dice.choice((0.0, 1.0, 2.5)), dice.choice(list(Condition)), dice.randrange(3)
            )
            for i in range(dice.randint(1, 6))
        ]
        sights = {one.name: Sight(dice.random(), dice.choice((0.0, dice.random()))) for one in candidates}
        chosen = choose(candidates, Turns(), lambda one, sights=sights: sights[one.name])  # type: ignore[misc]
        assert chosen in candidates
        assert chosen.condition is min(one.condition for one in candidates)
        if not chosen.weight:
            assert not any(one.weight for one in candidates if one.condition is chosen.condition)
