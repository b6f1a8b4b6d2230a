"""The functions that `filter` and `set` may call: an allow list.

Each function computes its value only from its arguments, and from settings that streamer pins
(`PINNED_STABLE`). Whatever the arguments, the function does not read a table, a file or a large
object, run SQL, wait, or change data. A name stands for all built-in functions with that name. A
test compares the list with ``pg_proc`` of every version. Pure.
"""

from typing import Final

GROUPS: Final[dict[str, str]] = {
    "Numbers": """
        abs acos acosd acosh asin asind asinh atan atan2 atan2d atand atanh cbrt ceil ceiling
        cos cosd cosh cot cotd degrees div erf erfc exp factorial floor gamma gcd lcm lgamma ln
        log log10 min_scale mod num_nonnulls num_nulls pi pow power radians round scale sign sin
        sind sinh sqrt tan tand tanh trim_scale trunc width_bucket
    """,
    "Text": """
        ascii bit_length btrim casefold char_length character_length chr concat concat_ws format
        initcap is_normalized left length like like_escape lower lpad ltrim md5 normalize
        notlike octet_length overlay parse_ident position quote_ident quote_literal
        quote_nullable regexp_count regexp_instr regexp_like regexp_match regexp_replace
        regexp_split_to_array regexp_substr repeat replace reverse right rpad rtrim split_part
        starts_with string_to_array strpos substr substring to_ascii to_bin to_hex to_oct
        translate unicode_assigned unistr upper
    """,
    "Bytes and bits": """
        bit_count convert_from convert_to crc32 crc32c decode encode get_bit get_byte set_bit
        set_byte sha224 sha256 sha384 sha512
    """,
    "Dates and times": """
        age date_add date_bin date_part date_subtract date_trunc extract isfinite justify_days
        justify_hours justify_interval make_date make_interval make_time make_timestamp
        make_timestamptz overlaps timezone to_char to_date to_number to_timestamp
    """,
    "Conversions": """
        bit bool bpchar bytea char cidr date float4 float8 int2 int4 int8 interval macaddr
        macaddr8 name numeric text time timestamp timestamptz timetz varchar
    """,
    "Arrays": """
        array_append array_cat array_dims array_fill array_length array_lower array_ndims
        array_position array_positions array_prepend array_remove array_replace array_reverse
        array_sort array_to_json array_to_string array_upper cardinality trim_array
    """,
    "JSON": """
        json_array_length json_build_array json_build_object json_extract_path
        json_extract_path_text json_object json_strip_nulls json_typeof jsonb_array_length
        jsonb_build_array jsonb_build_object jsonb_concat jsonb_contains jsonb_exists
        jsonb_exists_all jsonb_exists_any jsonb_extract_path jsonb_extract_path_text
        jsonb_insert jsonb_object jsonb_path_exists jsonb_path_exists_tz jsonb_path_match
        jsonb_path_match_tz jsonb_path_query_array jsonb_path_query_array_tz
        jsonb_path_query_first jsonb_path_query_first_tz jsonb_pretty jsonb_set jsonb_set_lax
        jsonb_strip_nulls jsonb_typeof row_to_json to_json to_jsonb
    """,
    "Ranges": """
        datemultirange daterange int4multirange int4range int8multirange int8range isempty
        lower_inc lower_inf multirange nummultirange numrange range_merge tsmultirange tsrange
        tstzmultirange tstzrange upper_inc upper_inf
    """,
    "Shapes": """
        area box center circle diagonal diameter height isclosed ishorizontal isopen isparallel
        isperp isvertical line lseg npoints path pclose point polygon popen radius slope width
    """,
    "Network addresses": """
        abbrev broadcast family host hostmask inet_merge inet_same_family macaddr8_set7bit
        masklen netmask network set_masklen
    """,
    "Text search": """
        array_to_tsvector numnode querytree setweight strip ts_delete ts_filter ts_rank
        ts_rank_cd tsquery_phrase tsvector_to_array
    """,
    "UUIDs and XML": """
        uuid_extract_timestamp uuid_extract_version xml_is_well_formed_content
        xml_is_well_formed_document xmlcomment xmltext xpath xpath_exists
    """,
}

ALLOWED: Final = frozenset(name for names in GROUPS.values() for name in names.split())

PINNED_STABLE: Final = frozenset(
    {
        *("age", "array_to_json", "array_to_string", "concat", "concat_ws", "convert_from"),
        *("convert_to", "date", "date_add", "date_part", "date_subtract", "date_trunc"),
        *(
            "extract",
            "numeric",
            "format",
            "interval",
            "json_build_array",
            "json_build_object",
            "jsonb_build_array",
        ),
        *("jsonb_build_object", "jsonb_path_exists_tz", "jsonb_path_match_tz"),
        *("jsonb_path_query_array_tz", "jsonb_path_query_first_tz", "length"),
        *("make_timestamp", "make_timestamptz", "overlaps", "quote_literal"),
        *("quote_nullable", "row_to_json", "time", "timestamp", "timestamptz", "timetz"),
        *("timezone", "to_char", "to_date", "to_json", "to_jsonb", "to_number"),
        "to_timestamp",
    }
)
"""STABLE functions that depend only on settings that streamer pins on every connection."""
