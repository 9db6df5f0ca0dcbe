import pytest
from tills import *


def test_sum_of_coins():
    assert Coin(2) + Coin(3) == Coin(5)


def test_sum_of_other_coins():
    one = Coin(20, "usd")
    assert one + Coin(31, "usd") == Coin(51, "usd")


def test_sum_is_an_amount():
    made = Coin(2) + Coin(5)
    assert made == 7


def test_sum_of_two_currencies():
    with pytest.raises(ValueError, match="usd"):
        Coin(1) + Coin(1, "usd")


def test_times():
    assert Coin(4).times(3) == Coin(12)


def test_times_nothing():
    assert Coin(4, "usd").times(0) == Coin(0, "usd")


def test_times_as_amounts():
    assert Coin(3).times(5) == 15
    assert Coin(7).times(2) == 14


def test_joined():
    assert Label(" red ").joined(Label("tin")) == "Red-Tin"


def test_joined_with_a_mark():
    assert Label("big").joined(Label(" jar "), "/") == "big / jar"


def test_joined_labels():
    assert Label("a").joined(Label("b")) == Label("A-B")


def test_parsed():
    assert parsed("12") == Coin(12)


def test_parsed_currency():
    assert parsed("30 usd") == Coin(30, "usd")


def test_parsed_amount():
    assert parsed("17") == 17


def test_parsed_nonsense():
    with pytest.raises(ValueError):
        parsed("x usd")


def test_biggest():
    assert biggest([Coin(3), Coin(9), Coin(4)]) == Coin(9)


def test_biggest_of_many():
    assert biggest(map(Coin, range(40))) == 39


def test_biggest_of_none():
    assert biggest([]) is None


def test_change():
    assert change(8) == [Coin(5), Coin(2), Coin(1)]


def test_change_of_sizes():
    assert change(40, (30, 7, 1)) == [Coin(30), Coin(7), Coin(1), Coin(1), Coin(1)]


def test_change_of_nothing():
    assert change(0) == []
