from unittest import mock

import pytest
from tills import *


def test_put():
    with Till() as till:
        till.put(4, 0, 7)
        assert till == [4, 7]


def test_put_gives_the_till():
    till = Till([3])
    assert till.put(9) is till
    assert till == [3, 9]


def test_put_nothing():
    assert Till().put(-2) == Till()


def test_block_that_fails():
    till = Till([1])
    with pytest.raises(KeyError), till:
        till.put(8)
        raise KeyError("no")
    assert till == [1]
    assert till.closed


def test_content():
    till = Till([1, 2])
    assert till.content == [1, 2]
    assert len(till) == 2


def test_sorted():
    with Till([3, 1, 2]) as till:
        assert till.sorted() == [1, 2, 3]


def test_sorted_tills():
    assert Till([9, 4]).sorted() == Till([4, 9])


def test_sorted_leaves_the_till():
    till = Till([5, 2])
    till.sorted()
    assert till == [5, 2]


def test_total():
    with Till([4, 5]) as till:
        assert till.total() == 9


def test_total_of_nothing():
    with Till() as till:
        assert till.total() == 0


def test_named():
    with Till([1, 2, 2]) as till:
        assert till.named({"one": 1, "two": 2, "six": 6}) == {"one": 1, "two": 2, "six": 0}


def test_named_nothing():
    with Till([1]) as till:
        assert till.named({}) == {}


def test_limited():
    till = Till([1, 2, 3])
    with limited(till, 2) as before:
        till.put(9)
        assert before == 3
    assert till == [1, 2]


def test_limited_is_no_limit():
    till = Till()
    with limited(till, 5):
        till.put(6, 7)
    assert till == [6, 7]


def test_merged():
    assert merged([Till([1]), Till([5, 6])]) == [1, 5, 6]


def test_merged_tills():
    assert merged([Till([8]), Till([3])]) == Till([8, 3])


def test_merged_lists():
    amounts = [[1, 2], [7]]
    assert merged(amounts) == [amount for each_ in amounts for amount in each_]


def test_merged_contains():
    till = merged([Till([11]), Till([12])])
    assert 11 in till
    assert 12 in till
    assert 13 not in till


def test_each():
    visit = mock.Mock(side_effect=[10, 20])
    assert each(Till([1, 2]), visit) == [10, 20]
    assert visit.call_args_list == [mock.call(Coin(1)), mock.call(Coin(2))]


def test_each_checks():
    def visit(coin):
        assert coin.currency == "eur"
        return coin.amount * 2

    assert each(Till([4]), visit) == [8]


def test_drained():
    till = Till([1, 2, 3])
    assert list(drained(till)) == [3, 2, 1]
    assert len(till) == 0


def test_drained_in_part():
    till = Till([1, 2, 3])
    for amount in drained(till):
        assert amount == 3
        break
    assert till == [1, 2]
