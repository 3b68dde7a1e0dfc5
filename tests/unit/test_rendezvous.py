"""Rendezvous order, one pair at a time and many at once."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.rendezvous import first_choices, hash_order, replica_hashes, weight, weights

NAMES = st.text(max_size=8)


@given(adapter=NAMES, ids=st.lists(NAMES, min_size=1, max_size=12, unique=True))
def test_many_weights_at_once_are_those_of_each_pair(adapter: str, ids: list[str]) -> None:
    assert weights(adapter, replica_hashes(ids)).tolist() == [weight(adapter, replica_id) for replica_id in ids]


def test_first_choices_are_the_first_in_order_however_many_there_are() -> None:
    ids = sorted(f"replica-{i}" for i in range(700))
    names = [f"adapter-{i}" for i in range(3300)]
    firsts = first_choices(names, ids)
    assert [firsts[i] for i in range(0, 3300, 300)] == [hash_order(names[i], ids)[0] for i in range(0, 3300, 300)]
    assert len(firsts) == len(names)
    assert len(set(firsts)) > 650, "with 4.7 adapters each on average, few replicas have none"


def test_an_adapter_and_a_replica_of_one_name_are_told_apart() -> None:
    assert len({weight(name, name) for name in map(str, range(50))}) == 50
