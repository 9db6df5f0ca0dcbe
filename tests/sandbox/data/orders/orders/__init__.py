"""Orders in a database."""

import psycopg2


class Orders:
    """The orders of a shop, in a table of PostgreSQL."""

    def __init__(self, where="host=127.0.0.1 user=postgres dbname=postgres"):
        self.connection = psycopg2.connect(where)
        with self.connection, self.connection.cursor() as cursor:
            cursor.execute("create table if not exists orders (id serial primary key, item text, price int, paid bool)")

    def add(self, item, price, paid=False):
        """Add an order; returns its number."""
        with self.connection, self.connection.cursor() as cursor:
            cursor.execute(
                "insert into orders (item, price, paid) values (%s, %s, %s) returning id", (item, price, paid)
            )
            return cursor.fetchone()[0]

    def pay(self, number):
        """Mark an order as paid; returns whether it was open."""
        with self.connection, self.connection.cursor() as cursor:
            cursor.execute("update orders set paid = true where id = %s and not paid", (number,))
            return cursor.rowcount == 1

    def open_items(self):
        """The items of open orders, by number."""
        with self.connection, self.connection.cursor() as cursor:
            cursor.execute("select item from orders where not paid order by id")
            return [item for (item,) in cursor.fetchall()]

    def revenue(self, at_least=0):
        """The sum of the paid orders whose price is at least so much."""
        with self.connection, self.connection.cursor() as cursor:
            cursor.execute("select coalesce(sum(price), 0) from orders where paid and price >= %s", (at_least,))
            return int(cursor.fetchone()[0])

    def cheapest(self, count=1):
        """The cheapest open items, at most `count`."""
        if count < 1:
            raise ValueError("count must be at least 1")
        with self.connection, self.connection.cursor() as cursor:
            cursor.execute("select item from orders where not paid order by price, id limit %s", (count,))
            return [item for (item,) in cursor.fetchall()]

    def clear(self):
        """Remove all orders."""
        with self.connection, self.connection.cursor() as cursor:
            cursor.execute("delete from orders")
