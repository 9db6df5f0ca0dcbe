from lib import numbers


def test_double():
    assert numbers.double(2) == 4
