"""A table with every type PostgreSQL has, and rows with the edges of each."""

from typing import Final

TYPES: Final = r"""
create type mood as enum ('sad', 'it''s "fine"', 'a,b{}', '\');
create domain positive as int check (value > 0);
create domain label as varchar(20) not null default 'x';
create type pair as (a int, b text, "C c" mood);
create type floatrange as range (subtype = float8, subtype_diff = float8mi);
create table every (
  id int primary key,
  i2 smallint, i8 bigint, n numeric, n2 numeric(12, 4), r real, d double precision, money_ money,
  b boolean, c char(5), vc varchar(30), tx text, "char_" "char", nm name, by bytea,
  da date, ti time, tz timetz, ts timestamp, tstz timestamptz, iv interval,
  u uuid, js json, jb jsonb, xm xml, ip inet, net cidr, mac macaddr, mac8 macaddr8,
  bi bit(5), vb bit varying(20), pt point, ln line, ls lseg, bx box, pa path, po polygon, ci circle,
  ir int4range, nr numrange, tr tstzrange, dr daterange, mr int4multirange, fr floatrange,
  tv tsvector, tq tsquery, lsn_ pg_lsn, o oid, jp jsonpath, xid_ xid, snap pg_snapshot,
  m mood, ms mood[], pos positive, la label, p pair, ps pair[],
  ia int[], ta text[], da2 date[], na numeric[], ja jsonb[], ba bytea[], ira int4range[]
);
"""

ROWS: Final = r"""
insert into every (id, la) values (1, 'nulls');
insert into every values (2,
  -32768, 9223372036854775807, 'NaN', -99999999.9999, '-0', 'Infinity', -92233720368547758.08,
  true, 'ab', '', '\N', 'x', 'name', '\x', 'infinity', '24:00:00', '24:00:00-15:59:59', '-infinity',
  '4713-01-01 00:00:00+00 BC', '-178000000 years 11 months -40 days +99:59:59.999999',
  'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{"a":1,"a":2, "n":1e400}', 'null', null,
  '::ffff:1.2.3.4/96', '10.0.0.0/8', '08:00:2b:01:02:03', '08:00:2b:01:02:03:04:05',
  B'10101', B'', '(1e300,-0)', '{1,2,3}', '[(0,0),(1,1)]', '(1,1),(0,0)', '[(0,0),(1,1)]',
  '((0,0),(1,1),(1,0))', '<(0,0),1e-300>', 'empty', '(,)', '[2020-01-01,infinity]', '[2020-01-01,)',
  '{[1,3),[5,9)}', '(-Infinity,1.5]', $$'a b':1A 'c''d':2$$, '!a & (b | c:*)', 'FFFFFFFF/FFFFFFFF',
  4294967295, '$.a[*] ? (@ > 1)', '4294967295', '10:20:10,14,15', '\',
  array['sad', 'a,b{}', null]::mood[], 2147483647, '', '(1,"a,""b""\\c",sad)',
  array[row(null, null, null), row(1, '', 'sad'), null]::pair[],
  '[-2:0]={1,NULL,3}', array['', 'NULL', null, '"', '\', '{}', E'\n\t'], '{infinity,"0001-01-01 BC"}',
  '{{1,NaN},{-0.00,1e-50}}', array['null'::jsonb, '{"b": [1, 2]}', null], array['\x00'::bytea, '', null],
  array['empty'::int4range, '[1,5)', '(,)']);
insert into every (id, la, n, r, d, tx, by, ts, tstz, da, iv, jb, c, vc) values
  (3, E'tab\there', ('1e1000'::numeric + 1), 1.4e-45, 4.9e-324, E'a\\b\tc\nd\re\bf\v\\.', decode(repeat('00ff5c0a09', 100), 'hex'),
   '294276-12-31 23:59:59.999999', '294276-12-31 23:59:59.999999+00', '5874897-12-31',
   '-1 mons +1 day -00:00:00.000001', '{"n": 12345678901234567890.123456789e10, "": "\u00e9\ud83d\ude00"}', '  ', '  x  '),
  (4, 'ünïcödé 😀', 0.000, 'NaN', '-Infinity', repeat('😀 long ', 3000), '\xdeadbeef', 'infinity', 'infinity', '0044-03-15 BC',
   '1 year 2 mons 3 days 04:05:06.7', '[]', 'é', E'\\'),
  (5, '\.', 1.10, 0.1, 0.1, '\.', '\x5c2e0a', '1900-01-01', '1900-01-01 00:00:00-00:44:30', '2000-02-29', '0', '0', '\.', '\N');
"""

UPDATES: Final = r"""
update every set i8 = coalesce(i8, 0) - 1, tx = coalesce(tx, 'was null') || E'\\', js = '[1, 2]' where id in (1, 2, 4);
update every set id = id + 100 where id in (3, 4);
delete from every where id = 5;
"""

SAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "bool": ("true", "false"),
    "bytea": ("\\x", "\\x00ff5c0a09"),
    "char": ("x", "", "\\"),
    "name": ("", "n" * 63),
    "int8": ("-9223372036854775808", "9223372036854775807"),
    "int2": ("-32768", "32767"),
    "int4": ("-2147483648", "2147483647"),
    "text": ("", "\\N", "\t\r\n\\.", "ünïcödé 😀"),
    "oid": ("0", "4294967295"),
    "tid": ("(0,1)", "(4294967295,65535)"),
    "xid": ("0", "4294967295"),
    "cid": ("0", "4294967295"),
    "json": ('{"a":1,"a":2, "n":1e400}', "null", '"\\u00e9"'),
    "xml": ("<a>é</a>", 'x<b c="d"/>y', '<?xml version="1.0" standalone="yes"?><a/>'),
    "point": ("(1e300,-0)", "(NaN,Infinity)"),
    "lseg": ("[(0,0),(1,1)]",),
    "path": ("[(0,0),(1,1)]", "((0,0),(1,1))"),
    "box": ("(1,1),(0,0)",),
    "polygon": ("((0,0),(1,1),(1,0))",),
    "line": ("{1,2,3}",),
    "cidr": ("10.0.0.0/8", "::/0"),
    "float4": ("-0", "NaN", "Infinity", "1.4e-45", "0.1"),
    "float8": ("-0", "NaN", "-Infinity", "4.9e-324", "0.1"),
    "circle": ("<(0,0),1e-300>",),
    "macaddr8": ("08:00:2b:01:02:03:04:05",),
    "money": ("-92233720368547758.08", "0.01"),
    "macaddr": ("08:00:2b:01:02:03",),
    "inet": ("::ffff:1.2.3.4/96", "1.2.3.4", "10.0.0.0/8"),
    "bpchar": ("", "ab  ", "é"),
    "varchar": ("", " x  "),
    "date": ("infinity", "-infinity", "4714-11-24 BC", "5874897-12-31", "0044-03-15 BC"),
    "time": ("24:00:00", "00:00:00.000001"),
    "timestamp": (
        "infinity",
        "-infinity",
        "4714-11-24 00:00:00 BC",
        "294276-12-31 23:59:59.999999",
    ),
    "timestamptz": (
        "infinity",
        "-infinity",
        "4714-11-24 00:00:00+00 BC",
        "1900-01-01 00:00:00-00:44:30",
    ),
    "interval": ("-178000000 years 11 months -40 days +99:59:59.999999", "1 mon", "30 days", "0"),
    "timetz": ("24:00:00-15:59:59", "00:00:00+15:59"),
    "bit": ("1",),
    "varbit": ("", "10101010101"),
    "numeric": ("NaN", "-Infinity", "1.0", "1.00", "0.000", "1e1000", "-99999999.9999", "1e-50"),
    "refcursor": ("a cursor",),
    "uuid": ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",),
    "txid_snapshot": ("10:20:10,14,15",),
    "pg_lsn": ("0/0", "FFFFFFFF/FFFFFFFF"),
    "tsvector": ("'a b':1A 'c''d':2", "", "'ü':3,4B"),
    "jsonb": ("null", "[]", '{"n": 12345678901234567890.1234567890, "": "é😀"}'),
    "int4range": ("empty", "(,)", "[1,5]"),
    "numrange": ("[1.0,1.00]", "(,5)"),
    "tsrange": ("[2020-01-01,infinity]",),
    "tstzrange": ("[2020-01-01,infinity)", "(,2020-01-01]"),
    "daterange": ("[2020-01-01,)",),
    "int8range": ("[1,9223372036854775806]",),
    "jsonpath": ('$."a"[*] ? (@ > 1)', "strict $"),
    "int4multirange": ("{}", "{[1,3),[5,9)}"),
    "nummultirange": ("{(,1.0],[2,)}",),
    "tsmultirange": ("{[2020-01-01,infinity]}",),
    "tstzmultirange": ("{[2020-01-01,2021-01-01)}",),
    "datemultirange": ("{[2020-01-01,2021-01-01)}",),
    "int8multirange": ("{[1,2),[9,)}",),
    "pg_snapshot": ("10:20:10,14,15", "1:1:"),
    "xid8": ("0", "18446744073709551615"),
}
"""Values of each of PostgreSQL's own types that a table can have."""
