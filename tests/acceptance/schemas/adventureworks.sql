-- The structure of AdventureWorks, a sample database with five schemas, written anew in part.

create domain "AccountNumber" varchar(15);
create domain "Flag" boolean not null;
create domain "NameStyle" boolean not null;
create domain "Name" varchar(50);
create domain "OrderNumber" varchar(25);
create domain "Phone" varchar(25);
create schema person;
create schema humanresources;
create schema production;
create schema purchasing;
create schema sales;
comment on schema sales is 'Customers and orders';

create table person.businessentity (
    businessentityid serial,
    rowguid uuid not null constraint "DF_BusinessEntity_rowguid" default (gen_random_uuid()),
    modifieddate timestamp not null constraint "DF_BusinessEntity_ModifiedDate" default (now())
);
create table person.person (
    businessentityid integer not null,
    persontype char(2) not null,
    namestyle "NameStyle" not null constraint "DF_Person_NameStyle" default (false),
    title varchar(8),
    firstname "Name" not null,
    middlename "Name",
    lastname "Name" not null,
    emailpromotion integer not null default (0),
    additionalcontactinfo text,
    rowguid uuid not null default (gen_random_uuid()),
    modifieddate timestamp not null default (now()),
    constraint "CK_Person_EmailPromotion" check (emailpromotion between 0 and 2),
    constraint "CK_Person_PersonType"
        check (persontype is null or upper(persontype) in ('SC', 'VC', 'IN', 'EM', 'SP', 'GC'))
);
create table person.countryregion (
    countryregioncode varchar(3) not null,
    name "Name" not null,
    modifieddate timestamp not null default (now())
);
create table person.stateprovince (
    stateprovinceid serial,
    stateprovincecode char(3) not null,
    countryregioncode varchar(3) not null,
    isonlystateprovinceflag "Flag" not null default (true),
    name "Name" not null,
    territoryid integer not null
);
create table person.address (
    addressid serial,
    addressline1 varchar(60) not null,
    addressline2 varchar(60),
    city varchar(30) not null,
    stateprovinceid integer not null,
    postalcode varchar(15) not null,
    spatiallocation bytea
);
create table person.phonenumbertype (phonenumbertypeid serial, name "Name" not null);
create table person.personphone (
    businessentityid integer not null,
    phonenumber "Phone" not null,
    phonenumbertypeid integer not null
);
create table humanresources.department (
    departmentid serial not null, name "Name" not null, groupname "Name" not null
);
create table humanresources.employee (
    businessentityid integer not null,
    nationalidnumber varchar(15) not null,
    loginid varchar(256) not null,
    jobtitle varchar(50) not null,
    birthdate date not null,
    maritalstatus char(1) not null,
    gender char(1) not null,
    hiredate date not null,
    salariedflag "Flag" not null default (true),
    vacationhours smallint not null default (0),
    organizationnode varchar default '/',
    constraint "CK_Employee_BirthDate" check (birthdate between '1930-01-01' and now() - interval '18 years'),
    constraint "CK_Employee_MaritalStatus" check (upper(maritalstatus) in ('M', 'S')),
    constraint "CK_Employee_HireDate" check (hiredate between '1996-07-01' and now() + interval '1 day'),
    constraint "CK_Employee_VacationHours" check (vacationhours between -40 and 240)
);
create table humanresources.employeedepartmenthistory (
    businessentityid integer not null,
    departmentid smallint not null,
    startdate date not null,
    enddate date,
    constraint "CK_EmployeeDepartmentHistory_EndDate" check (enddate >= startdate or enddate is null)
);
create table production.productcategory (productcategoryid serial not null, name "Name" not null);
create table production.unitmeasure (unitmeasurecode char(3) not null, name "Name" not null);
create table production.product (
    productid serial not null,
    name "Name" not null,
    productnumber varchar(25) not null,
    makeflag "Flag" not null default (true),
    color varchar(15),
    safetystocklevel smallint not null,
    standardcost numeric not null,
    listprice numeric not null,
    size varchar(5),
    sizeunitmeasurecode char(3),
    weight decimal(8,2),
    class char(2),
    sellstartdate timestamp not null,
    sellenddate timestamp,
    rowguid uuid not null default (gen_random_uuid()),
    constraint "CK_Product_SafetyStockLevel" check (safetystocklevel > 0),
    constraint "CK_Product_ListPrice" check (listprice >= 0.00),
    constraint "CK_Product_Class" check (upper(class) in ('L', 'M', 'H') or class is null),
    constraint "CK_Product_SellEndDate" check (sellenddate >= sellstartdate or sellenddate is null)
);
create table production.billofmaterials (
    billofmaterialsid serial not null,
    productassemblyid integer,
    componentid integer not null,
    startdate timestamp not null default (now()),
    enddate timestamp,
    bomlevel smallint not null,
    perassemblyqty decimal(8,2) not null default (1.00),
    constraint "CK_BillOfMaterials_ProductAssemblyID" check (productassemblyid <> componentid),
    constraint "CK_BillOfMaterials_BOMLevel" check (
        (productassemblyid is null and bomlevel = 0 and perassemblyqty = 1.00)
        or (productassemblyid is not null and bomlevel >= 1))
);
create table production.document (
    title varchar(50) not null,
    folderflag "Flag" not null default (false),
    changenumber integer not null default (0),
    status smallint not null,
    document bytea,
    rowguid uuid not null unique default (gen_random_uuid()),
    documentnode varchar default '/',
    constraint "CK_Document_Status" check (status between 1 and 3)
);
create table purchasing.vendor (
    businessentityid integer not null,
    accountnumber "AccountNumber" not null,
    name "Name" not null,
    creditrating smallint not null,
    activeflag "Flag" not null default (true),
    constraint "CK_Vendor_CreditRating" check (creditrating between 1 and 5)
);
create table sales.salesterritory (
    territoryid serial not null,
    name "Name" not null,
    "group" varchar(50) not null,
    salesytd numeric not null default (0.00),
    constraint "CK_SalesTerritory_SalesYTD" check (salesytd >= 0.00)
);
create table sales.customer (
    customerid serial not null,
    personid integer,
    territoryid integer,
    rowguid uuid not null default (gen_random_uuid())
);
create table sales.salesorderheader (
    salesorderid serial not null,
    revisionnumber smallint not null default (0),
    orderdate timestamp not null default (now()),
    duedate timestamp not null,
    status smallint not null default (1),
    onlineorderflag "Flag" not null default (true),
    purchaseordernumber "OrderNumber",
    customerid integer not null,
    subtotal numeric not null default (0.00),
    taxamt numeric not null default (0.00),
    totaldue numeric generated always as (subtotal + taxamt) stored,
    constraint "CK_SalesOrderHeader_DueDate" check (duedate >= orderdate)
);
create table sales.salesorderdetail (
    salesorderid integer not null,
    salesorderdetailid serial not null,
    orderqty smallint not null,
    productid integer not null,
    unitprice numeric not null,
    unitpricediscount numeric not null default (0.0),
    constraint "CK_SalesOrderDetail_OrderQty" check (orderqty > 0)
);

alter table person.businessentity add constraint "PK_BusinessEntity_BusinessEntityID" primary key (businessentityid);
cluster person.businessentity using "PK_BusinessEntity_BusinessEntityID";
alter table person.person add constraint "PK_Person_BusinessEntityID" primary key (businessentityid);
alter table person.countryregion add constraint "PK_CountryRegion_CountryRegionCode" primary key (countryregioncode);
alter table person.stateprovince add constraint "PK_StateProvince_StateProvinceID" primary key (stateprovinceid);
alter table person.address add constraint "PK_Address_AddressID" primary key (addressid);
alter table person.phonenumbertype add constraint "PK_PhoneNumberType_PhoneNumberTypeID" primary key (phonenumbertypeid);
alter table person.personphone add constraint "PK_PersonPhone" primary key (businessentityid, phonenumber, phonenumbertypeid);
alter table humanresources.department add constraint "PK_Department_DepartmentID" primary key (departmentid);
alter table humanresources.employee add constraint "PK_Employee_BusinessEntityID" primary key (businessentityid);
alter table humanresources.employeedepartmenthistory
    add constraint "PK_EmployeeDepartmentHistory" primary key (businessentityid, startdate, departmentid);
alter table production.productcategory add constraint "PK_ProductCategory" primary key (productcategoryid);
alter table production.unitmeasure add constraint "PK_UnitMeasure_UnitMeasureCode" primary key (unitmeasurecode);
alter table production.product add constraint "PK_Product_ProductID" primary key (productid);
alter table production.billofmaterials add constraint "PK_BillOfMaterials" primary key (billofmaterialsid);
alter table production.document add constraint "PK_Document_DocumentNode" primary key (documentnode);
alter table purchasing.vendor add constraint "PK_Vendor_BusinessEntityID" primary key (businessentityid);
alter table sales.salesterritory add constraint "PK_SalesTerritory_TerritoryID" primary key (territoryid);
alter table sales.customer add constraint "PK_Customer_CustomerID" primary key (customerid);
alter table sales.salesorderheader add constraint "PK_SalesOrderHeader_SalesOrderID" primary key (salesorderid);
alter table sales.salesorderdetail
    add constraint "PK_SalesOrderDetail" primary key (salesorderid, salesorderdetailid);

alter table person.person add constraint "FK_Person_BusinessEntity" foreign key (businessentityid)
    references person.businessentity (businessentityid);
alter table person.stateprovince add constraint "FK_StateProvince_CountryRegion" foreign key (countryregioncode)
    references person.countryregion (countryregioncode);
alter table person.stateprovince add constraint "FK_StateProvince_SalesTerritory" foreign key (territoryid)
    references sales.salesterritory (territoryid);
alter table person.address add constraint "FK_Address_StateProvince" foreign key (stateprovinceid)
    references person.stateprovince (stateprovinceid);
alter table person.personphone add constraint "FK_PersonPhone_Person" foreign key (businessentityid)
    references person.person (businessentityid);
alter table humanresources.employee add constraint "FK_Employee_Person" foreign key (businessentityid)
    references person.person (businessentityid);
alter table humanresources.employeedepartmenthistory add constraint "FK_History_Employee"
    foreign key (businessentityid) references humanresources.employee (businessentityid);
alter table production.product add constraint "FK_Product_UnitMeasure" foreign key (sizeunitmeasurecode)
    references production.unitmeasure (unitmeasurecode);
alter table production.billofmaterials add constraint "FK_BillOfMaterials_Product_Component"
    foreign key (componentid) references production.product (productid);
alter table purchasing.vendor add constraint "FK_Vendor_BusinessEntity" foreign key (businessentityid)
    references person.businessentity (businessentityid);
alter table sales.customer add constraint "FK_Customer_Person" foreign key (personid)
    references person.person (businessentityid);
alter table sales.salesorderheader add constraint "FK_SalesOrderHeader_Customer" foreign key (customerid)
    references sales.customer (customerid);
alter table sales.salesorderdetail add constraint "FK_SalesOrderDetail_SalesOrderHeader"
    foreign key (salesorderid) references sales.salesorderheader (salesorderid) on delete cascade;
create unique index "AK_Product_Name" on production.product (name);

comment on table person.address is 'Street address information for customers, employees, and vendors.';
comment on column person.address.postalcode is 'Postal code for the street address.';
create view humanresources.vemployee as
    select e.businessentityid, p.firstname, p.lastname, e.jobtitle
      from humanresources.employee e join person.person p using (businessentityid);
create materialized view person.vstateprovincecountryregion as
    select sp.stateprovinceid, cr.name from person.stateprovince sp join person.countryregion cr using (countryregioncode);
create unique index ix_vstateprovincecountryregion on person.vstateprovincecountryregion (stateprovinceid);

-- rows
insert into person.businessentity select from generate_series(1, 20);
insert into person.person (businessentityid, persontype, firstname, lastname, additionalcontactinfo)
    select g, 'EM', 'F' || g, 'L' || g, '<a n="' || g || '"/>' from generate_series(1, 20) g;
insert into person.countryregion values ('DE', 'Germany');
insert into sales.salesterritory (name, "group") values ('Central', 'Europe');
insert into person.stateprovince (stateprovincecode, countryregioncode, name, territoryid) values ('NW', 'DE', 'NRW', 1);
insert into person.address (addressline1, city, stateprovinceid, postalcode)
    select 'Markt ' || g, 'Aachen', 1, '5206' || g from generate_series(1, 9) g;
insert into person.phonenumbertype (name) values ('Cell');
insert into person.personphone select g, '0241 ' || g, 1 from generate_series(1, 9) g;
insert into humanresources.department (name, groupname) values ('Engineering', 'Research');
insert into humanresources.employee (businessentityid, nationalidnumber, loginid, jobtitle, birthdate, maritalstatus, gender, hiredate)
    select g, g, 'l' || g, 'Engineer', '1970-01-01', 'S', 'F', '2010-01-01' from generate_series(1, 9) g;
insert into humanresources.employeedepartmenthistory values (1, 1, '2010-01-01', null);
insert into production.productcategory (name) values ('Bikes');
insert into production.unitmeasure values ('CM ', 'Centimeter');
insert into production.product (name, productnumber, safetystocklevel, standardcost, listprice, sizeunitmeasurecode, sellstartdate)
    select 'Bike ' || g, 'BK-' || g, 10, g * 1.5, g * 2.25, 'CM ', '2011-05-31' from generate_series(1, 20) g;
insert into production.billofmaterials (productassemblyid, componentid, bomlevel) values (1, 2, 1);
insert into production.document (title, status) values ('Manual', 2);
insert into purchasing.vendor (businessentityid, accountnumber, name, creditrating) values (19, 'V1', 'Vendor', 1);
insert into sales.customer (personid, territoryid) select g, 1 from generate_series(1, 20) g;
insert into sales.salesorderheader (duedate, customerid, subtotal) select now() + interval '9 days', g, g from generate_series(1, 20) g;
insert into sales.salesorderdetail (salesorderid, orderqty, productid, unitprice) select g, 1, g, g from generate_series(1, 20) g;
update production.product set color = 'Red' where productid % 2 = 0;
delete from person.personphone where businessentityid = 9;
