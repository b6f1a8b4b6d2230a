-- The structure of Northwind, the sample database of a trader, written anew.

create table categories (
    category_id smallint not null primary key,
    category_name character varying(15) not null,
    description text,
    picture bytea
);
create table customer_demographics (
    customer_type_id character varying(5) not null primary key,
    customer_desc text
);
create table customers (
    customer_id character varying(5) not null primary key,
    company_name character varying(40) not null,
    contact_name character varying(30),
    region character varying(15),
    postal_code character varying(10),
    country character varying(15),
    phone character varying(24)
);
create table customer_customer_demo (
    customer_id character varying(5) not null references customers,
    customer_type_id character varying(5) not null references customer_demographics,
    primary key (customer_id, customer_type_id)
);
create table employees (
    employee_id smallint not null primary key,
    last_name character varying(20) not null,
    first_name character varying(10) not null,
    title_of_courtesy character varying(25),
    birth_date date,
    hire_date date,
    photo bytea,
    notes text,
    reports_to smallint references employees,
    photo_path character varying(255)
);
create table suppliers (
    supplier_id smallint not null primary key,
    company_name character varying(40) not null,
    homepage text
);
create table products (
    product_id smallint not null primary key,
    product_name character varying(40) not null,
    supplier_id smallint references suppliers,
    category_id smallint references categories,
    quantity_per_unit character varying(20),
    unit_price real,
    units_in_stock smallint,
    discontinued integer not null
);
create table region (
    region_id smallint not null primary key,
    region_description character varying(60) not null
);
create table shippers (
    shipper_id smallint not null primary key,
    company_name character varying(40) not null
);
create table orders (
    order_id smallint not null primary key,
    customer_id character varying(5) references customers,
    employee_id smallint references employees,
    order_date date,
    shipped_date date,
    ship_via smallint references shippers,
    freight real,
    ship_name character varying(40)
);
create table territories (
    territory_id character varying(20) not null primary key,
    territory_description character varying(60) not null,
    region_id smallint not null references region
);
create table employee_territories (
    employee_id smallint not null references employees,
    territory_id character varying(20) not null references territories,
    primary key (employee_id, territory_id)
);
create table order_details (
    order_id smallint not null references orders,
    product_id smallint not null references products,
    unit_price real not null,
    quantity smallint not null,
    discount real not null,
    primary key (order_id, product_id)
);
create table us_states (
    state_id smallint not null primary key,
    state_name character varying(100),
    state_abbr character varying(2)
);
create view order_subtotals as
    select order_id, sum(unit_price * quantity * (1 - discount)) from order_details group by order_id;

-- rows
insert into categories values (1, 'Beverages', 'Soft drinks, coffees', '\x'), (2, 'Condiments', null, '\x00ff');
insert into customers select 'C' || g, 'Company ' || g from generate_series(1, 20) g;
insert into customer_demographics values ('a', 'all');
insert into customer_customer_demo values ('C1', 'a');
insert into employees (employee_id, last_name, first_name, birth_date, reports_to)
    select g, 'L' || g, 'F' || g, date '1950-01-01' + g, nullif(g / 2, 0) from generate_series(1, 9) g;
insert into suppliers select g, 'S' || g from generate_series(1, 5) g;
insert into products select g, 'P' || g, 1 + g % 5, 1 + g % 2, '24', g * 1.1, g, 0 from generate_series(1, 30) g;
insert into region values (1, 'Eastern');
insert into shippers values (1, 'Speedy');
insert into orders select g, 'C' || 1 + g % 20, 1 + g % 9, date '1996-07-04' + g, null, 1, 32.38 / g
    from generate_series(1, 50) g;
insert into territories values ('01581', 'Westboro', 1);
insert into employee_territories values (1, '01581');
insert into order_details select g, 1 + g % 30, 0.1 * g, g, 0.05 from generate_series(1, 50) g;
insert into us_states values (1, 'Alabama', 'AL');
update orders set shipped_date = order_date + 3 where order_id % 2 = 0;
delete from order_details where order_id > 45;
