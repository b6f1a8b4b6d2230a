"""The work in a shop while its changes stream: customers order, pay, return, look and leave.

Each customer keeps a fixed pace, which leaves processor time for streamer. The demo shows that
streamer keeps up, not its highest speed.
"""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import psycopg

from streamer.commands.demo import shop_tables

CLIENTS_PER_SHOP: Final = 2
TRANSACTIONS_PER_SECOND: Final = 120.0
"""The rate of each client."""
SALE_SECONDS: Final = 4.0
"""The pause between sales, which change thousands of rows at once."""
SALE_PRODUCTS: Final = 500
ARCHIVED_ORDERS: Final = 3_000

Connection = psycopg.AsyncConnection[tuple[Any, ...]]


class ShopClient:
    """A connection to a shop, and the customer who uses it."""

    def __init__(self, sid: str, url: str, number: int) -> None:
        self.transactions = 0
        self.statements = 0
        self._sid = sid
        self._url = url
        self._is_manager = number == 0
        self._random = random.Random(f"{sid} {number}")
        self._last_order = shop_tables.ORDERS
        self._connection: Connection | None = None

    async def run(self, ends_at: float) -> None:
        """Work until *ends_at* of the monotonic clock, and finish the work in progress."""
        actions, weights = zip(*_ACTIONS, strict=True)
        next_sale = time.monotonic() + SALE_SECONDS / 2
        due = time.monotonic()
        async with await psycopg.AsyncConnection.connect(self._url, autocommit=True) as connection:
            self._connection = connection
            while (now := time.monotonic()) < ends_at:
                action: Callable[[ShopClient], Awaitable[None]]
                if self._is_manager and now >= next_sale:
                    next_sale += SALE_SECONDS
                    action = ShopClient._hold_a_sale
                else:
                    (action,) = self._random.choices(actions, weights)
                await self._transact(action)
                # A late client catches up in part only.
                due = max(due + self._random.expovariate(TRANSACTIONS_PER_SECOND), now - 0.2)
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _transact(self, action: "Callable[[ShopClient], Awaitable[None]]") -> None:
        assert self._connection is not None
        try:
            async with self._connection.transaction():
                await action(self)
                if self._random.random() < 0.02:
                    raise psycopg.Rollback
        except (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure):
            return  # an application would retry; the demo goes on with the next action
        self.transactions += 1

    async def _execute(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        assert self._connection is not None
        self.statements += 1
        cursor = await self._connection.execute(sql.encode(), parameters)
        return await cursor.fetchall() if cursor.description else []

    async def _count_action(self, action: str, **detail: Any) -> None:
        await self._execute(
            "insert into audit.events (actor, action, detail) values (%s, %s, %s)",
            f"clerk {self._random.randrange(40)}",
            action,
            json.dumps(detail),
        )

    def _some_order(self) -> int:
        """Return the id of an order, more often a late order than an early order."""
        age = int(self._random.expovariate(1 / 3000))
        return max(1, self._last_order - age)

    # ---- actions of customers -------------------------------------------------------------------

    async def _order(self) -> None:
        customer = self._random.randint(1, shop_tables.CUSTOMERS)
        # Ordered by id, to avoid deadlocks.
        products = sorted(
            self._random.sample(range(1, shop_tables.PRODUCTS + 1), self._random.randint(1, 5))
        )
        ((order,),) = await self._execute(
            "insert into orders (customer_id, total, note) values (%s, 0, %s) returning id",
            customer,
            self._random.choice([None, None, "leave it with the neighbours", "naïve “quotes”\n€"]),
        )
        await self._execute(
            "insert into order_items select %s, line, product, 1 + line %% 3, 9.99 * line"
            " from unnest(%s::int[]) with ordinality u (product, line)",
            order,
            products,
        )
        # The description, stored out of line, stays unchanged.
        await self._execute(
            "update products set stock = stock - 1, updated_at = now() where id = any (%s)",
            products,
        )
        await self._execute(
            "update orders set total = (select sum(quantity * price) from order_items"
            " where order_id = id) where id = %s",
            order,
        )
        await self._count_action("order", order=order, items=len(products))
        self._last_order = order

    async def _pay(self) -> None:
        order = self._some_order()
        await self._execute("update orders set status = 'paid' where id = %s", order)
        await self._count_action("payment", order=order, amount=self._random.random() * 300)

    async def _ship(self) -> None:
        await self._execute(
            "update orders set status = 'shipped', shipped_at = localtimestamp where id = %s",
            self._some_order(),
        )

    async def _cancel(self) -> None:
        order = self._some_order()
        await self._execute("delete from orders where id = %s", order)  # also deletes the items
        await self._count_action("cancel", order=order)

    async def _register(self) -> None:
        number = self._random.randrange(10**9)
        await self._execute(
            "insert into customers (name, email, city, profile) values (%s, %s, %s, %s)",
            f"Customer {number}",
            f"customer{number}@{self._sid}.example.com",
            None,
            json.dumps({"language": self._sid, "points": 0}),
        )

    async def _move(self) -> None:
        await self._execute(
            "update customers set city = %s, profile = profile || %s where id = %s",
            self._random.choice(["Reykjavík", "Sarajevo", "Las Vegas", None]),
            json.dumps({"moved": True}),
            self._random.randint(1, shop_tables.CUSTOMERS),
        )

    async def _change_price(self) -> None:
        product = self._random.randint(1, shop_tables.PRODUCTS)
        currency = self._random.choice(shop_tables.CURRENCIES[self._sid])
        await self._execute(
            "update prices set amount = amount + 0.01 where product_id = %s and currency = %s",
            product,
            currency,
        )
        if self._random.random() < 0.3:
            await self._execute(
                "update prices set amount = amount * 1.05 where product_id = %s and currency = %s",
                product,
                currency,
            )

    async def _end_price(self) -> None:
        """Delete a price, or set a missing price."""
        product = self._random.randint(1, 50)
        (currency, *_) = shop_tables.CURRENCIES[self._sid]
        deleted = await self._execute(
            "delete from prices where product_id = %s and currency = %s returning 1",
            product,
            currency,
        )
        if not deleted:
            await self._execute(
                "insert into prices values (%s, %s, 19.99, 'infinity')", product, currency
            )

    async def _describe(self) -> None:
        product = self._random.randint(1, shop_tables.PRODUCTS)
        await self._execute(
            "update products set description = %s where id = %s",
            f"Newly described: {self._random.random()}\n" * self._random.randint(1, 300),
            product,
        )

    async def _fill_cart(self) -> None:
        await self._execute(
            "insert into carts select gen_random_uuid(), %s, g from generate_series(1, 3) g",
            self._random.randint(1, shop_tables.PRODUCTS),
        )

    async def _sweep_carts(self) -> None:
        await self._execute("truncate carts")

    async def _hold_a_sale(self) -> None:
        """Change thousands of rows in a single transaction."""
        first = self._random.randint(1, shop_tables.PRODUCTS - SALE_PRODUCTS)
        await self._execute(
            "update prices set amount = round(amount * 0.99, 2) where product_id between %s and %s",
            first,
            first + SALE_PRODUCTS,
        )
        first = self._random.randint(1, shop_tables.ORDERS)
        await self._execute(
            "update orders set status = 'delivered' where id between %s and %s",
            first,
            first + ARCHIVED_ORDERS,
        )


_ACTIONS: Final[tuple[tuple[Callable[[ShopClient], Awaitable[None]], float], ...]] = (
    (ShopClient._order, 35),
    (ShopClient._pay, 20),
    (ShopClient._ship, 12),
    (ShopClient._cancel, 5),
    (ShopClient._register, 6),
    (ShopClient._move, 6),
    (ShopClient._change_price, 8),
    (ShopClient._end_price, 2),
    (ShopClient._describe, 2),
    (ShopClient._fill_cart, 6),
    (ShopClient._sweep_carts, 0.5),
)


class Workload:
    """All clients of all shops."""

    def __init__(self, urls: dict[str, str]) -> None:
        self.clients = {
            sid: [ShopClient(sid, url, number) for number in range(CLIENTS_PER_SHOP)]
            for sid, url in urls.items()
        }

    def transactions(self, sid: str) -> int:
        """The number of transactions at a shop, including rolled back transactions."""
        return sum(client.transactions for client in self.clients[sid])

    async def run(self, seconds: float) -> None:
        """Keep all customers busy for *seconds*."""
        ends_at = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for sid, clients in self.clients.items():
                for number, client in enumerate(clients):
                    group.create_task(client.run(ends_at), name=f"client {sid} {number}")
