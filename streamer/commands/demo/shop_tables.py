"""The shops: tables, initial rows, and the target of each table."""

from dataclasses import dataclass
from typing import Final

from streamer.mapping.rule_options import TableType

DATABASE: Final = "shop"
WAREHOUSE: Final = "warehouse"

CUSTOMERS: Final = 20_000
PRODUCTS: Final = 2_000
ORDERS: Final = 80_000
EVENTS: Final = 80_000
CARTS: Final = 500
CURRENCIES: Final = {"eu": ("EUR", "GBP"), "us": ("USD", "CAD")}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the shops, and its rule in the configuration."""

    source: str
    target: str
    type: TableType = TableType.CLONE
    excluded: tuple[str, ...] = ()


TABLES: Final = (
    Table("public.customers", "public.customers", excluded=("password_hash",)),
    Table("public.products", "public.products"),
    Table("public.prices", "public.prices", TableType.HISTORY),
    Table("public.orders", "sales.orders"),
    Table("public.order_items", "sales.order_items"),
    Table("public.carts", "public.carts"),
    Table("audit.events", "audit.events", TableType.APPEND),
)

# The content of TABLES, in YAML as a person would write it.
TABLES_YAML: Final = """\
      customers: {exclude: [password_hash]}
      products:
      prices: {type: history}
      orders: {target: sales.orders}
      order_items: {target: sales.order_items}
      carts:
      audit.events: {target: audit.events, type: append}
"""

# Foreign keys and further indexes come after the rows.
SCHEMA: Final = """
create type order_status as enum ('new', 'paid', 'shipped', 'delivered', 'cancelled');
create table customers (
    id bigint generated always as identity primary key,
    name text not null,
    email text not null,
    city text,
    tags text[] not null default '{}',
    profile jsonb,
    password_hash bytea,
    created_at timestamptz not null default now()
);
create table products (
    id integer primary key,
    sku text not null,
    name text not null,
    description text,
    stock integer not null,
    weight double precision,
    updated_at timestamptz not null default now()
);
alter table products alter description set storage external;
create table prices (
    product_id integer,
    currency char(3),
    amount numeric(12, 2) not null,
    valid_until date,
    primary key (product_id, currency)
);
create table orders (
    id bigint generated always as identity primary key,
    customer_id bigint not null,
    status order_status not null default 'new',
    total numeric(12, 2) not null,
    note text,
    placed_at timestamptz not null default now(),
    shipped_at timestamp
);
create table order_items (
    order_id bigint,
    line smallint,
    product_id integer not null,
    quantity integer not null,
    price numeric(12, 2) not null,
    primary key (order_id, line)
);
create table carts (
    session uuid primary key,
    product_id integer not null,
    quantity integer not null,
    touched_at timestamptz not null default clock_timestamp()
);
create schema audit;
create table audit.events (
    at timestamptz not null default clock_timestamp(),
    actor text not null,
    action text not null,
    detail jsonb
);
"""

_CITIES: Final = {
    "eu": ("Wien", "Zürich", "Łódź", "København", "Αθήνα", "Porto", "Gent", "Tallinn", "Genève"),
    "us": ("Austin", "Boise", "Chicago", "Denver", "El Paso", "Fargo", "San José", "Juneau"),
}
_FIRST_NAMES: Final = (
    *("Anna", "Björn", "Chloé", "David", "Emília", "Farid", "Grace", "Håkon", "Ines", "Jürgen"),
    *("Kateřina", "Liam", "Mária", "Noah", "Olivia", "Pavel", "Rosa", "Søren", "Theo", "Zoë"),
)
_LAST_NAMES: Final = (
    *("Almeida", "Berg", "Çelik", "Dubois", "Evans", "Fernández", "Groß", "Hansen", "Ito"),
    *("Jansen", "Kowalski", "Lopez", "Müller", "Nowak", "O'Brien", "Papadakis", "Quinn", "Rossi"),
)


def _array(words: tuple[str, ...]) -> str:
    quoted = ", ".join("'" + word.replace("'", "''") + "'" for word in words)
    return f"(array[{quoted}])"


def _pick(words: tuple[str, ...], number: str) -> str:
    return f"{_array(words)}[1 + ({number}) % {len(words)}]"


def seed_sql(sid: str) -> str:
    """Return the SQL that fills a shop's tables: equal rows at every run, with different times."""
    name = f"{_pick(_FIRST_NAMES, 'g * 7')} || ' ' || {_pick(_LAST_NAMES, 'g / 3')}"
    return f"""
select setseed({0.25 if sid == "eu" else 0.75});
insert into customers (name, email, city, tags, profile, password_hash, created_at)
select {name}, 'customer' || g || '@{sid}.example.com',
       case when g % 11 > 0 then {_pick(_CITIES[sid], "g")} end,
       case g % 4 when 0 then '{{}}' when 1 then '{{newsletter}}'
         else array['newsletter', 'since ' || 2010 + g % 15] end,
       jsonb_build_object('language', '{sid}', 'points', g % 1000, 'premium', g % 17 = 0),
       sha256(g::text::bytea), now() - random() * interval '3 years'
from generate_series(1, {CUSTOMERS}) g;
insert into products
select g, '{sid}-' || lpad(g::text, 6, '0'), 'Article ' || g || ', "boxed"',
       repeat('Line ' || g || ' of what it is good for.' || E'\\n', 90 + g % 90),
       100 + g % 900, random() * 30
from generate_series(1, {PRODUCTS}) g;
insert into prices
select g, currency, round((1 + random() * 300)::numeric, 2),
       case when g % 9 = 0 then 'infinity' when g % 5 = 0 then current_date + g % 365 end::date
from generate_series(1, {PRODUCTS}) g, unnest({_array(CURRENCIES[sid])}) currency;
insert into orders (customer_id, status, total, note, placed_at, shipped_at)
select 1 + floor(random() * {CUSTOMERS}), (enum_range(null::order_status))[1 + g % 5], 0,
       case when g % 20 = 0 then E'Please ring\\ttwice \\\\ thank you' end,
       now() - random() * interval '1 year', case when g % 5 in (2, 3) then localtimestamp end
from generate_series(1, {ORDERS}) g;
insert into order_items
select g, line, 1 + floor(random() * {PRODUCTS}), 1 + floor(random() * 4),
       round((1 + random() * 300)::numeric, 2)
from generate_series(1, {ORDERS}) g, generate_series(1, 1 + g % 4) line;
insert into audit.events
select now() - random() * interval '1 year', 'clerk ' || g % 40,
       (array['login', 'order', 'refund', 'export'])[1 + g % 4],
       jsonb_build_object('order', g, 'ip', '10.0.' || g % 256 || '.' || g % 199)
from generate_series(1, {EVENTS}) g;
insert into carts
select gen_random_uuid(), 1 + g % {PRODUCTS}, 1 from generate_series(1, {CARTS}) g;
alter table orders add foreign key (customer_id) references customers;
alter table order_items add foreign key (order_id) references orders on delete cascade;
analyze;
"""  # noqa: S608  # all of it is ours
