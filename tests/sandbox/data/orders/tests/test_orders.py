import pytest
from orders import Orders


@pytest.fixture
def orders():
    orders = Orders()
    orders.clear()
    return orders


def test_add(orders):
    first = orders.add("pen", 3)
    assert orders.add("ink", 5) == first + 1
    assert orders.open_items() == ["pen", "ink"]


def test_pay(orders):
    number = orders.add("pen", 3)
    assert orders.pay(number)
    assert not orders.pay(number)
    assert orders.open_items() == []


def test_revenue(orders):
    orders.add("pen", 3, paid=True)
    orders.add("ink", 5, paid=True)
    orders.add("cap", 9)
    assert orders.revenue() == 8
    assert orders.revenue(4) == 5
    assert orders.revenue(5) == 5


def test_cheapest(orders):
    for item, price in (("pen", 3), ("ink", 5), ("cap", 2)):
        orders.add(item, price)
    assert orders.cheapest() == ["cap"]
    assert orders.cheapest(2) == ["cap", "pen"]
    with pytest.raises(ValueError):
        orders.cheapest(0)


def test_paid_orders_are_not_open(orders):
    orders.add("pen", 3, paid=True)
    orders.add("ink", 5)
    assert orders.open_items() == ["ink"]
    assert orders.cheapest(3) == ["ink"]
