"""The JSON schema of a configuration file, for editors.

Editors check a file and complete its keys by the schema. The schema accepts every file that
`load_settings` accepts, and also files with faults that JSON Schema cannot express.
"""

from collections.abc import Iterator
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from streamer.config.choices import CHOICES
from streamer.config.settings import Settings

_VARIABLE: Final[JsonSchemaValue] = {"type": "string", "pattern": r"\$\{[^}]+\}"}
"""A string that streamer completes from the environment."""


class _FileSchema(GenerateJsonSchema):
    """Accepts ``${NAME}`` in place of a number or a word, and no key outside a pattern."""

    def int_schema(self, schema: core_schema.IntSchema) -> JsonSchemaValue:
        return {"anyOf": [super().int_schema(schema), _VARIABLE]}

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return {"anyOf": [super().float_schema(schema), _VARIABLE]}

    def bool_schema(self, schema: core_schema.BoolSchema) -> JsonSchemaValue:
        return {"anyOf": [super().bool_schema(schema), _VARIABLE]}

    def enum_schema(self, schema: core_schema.EnumSchema) -> JsonSchemaValue:
        json_schema = super().enum_schema(schema)
        json_schema.pop("description", None)  # a docstring is for readers of the code
        return {"anyOf": [json_schema, _VARIABLE]}

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        json_schema = super().dict_schema(schema)
        if "patternProperties" in json_schema:
            json_schema["additionalProperties"] = False
        return json_schema


def schema_of_file() -> dict[str, Any]:
    """Return the schema (JSON Schema draft 2020-12) as a dictionary that `json.dumps` accepts."""
    schema = Settings.model_json_schema(schema_generator=_FileSchema)
    for model in (schema, *schema["$defs"].values()):
        model.pop("description", None)
        for name, field in model.get("properties", {}).items():
            if "description" in field:
                field["description"] = "\n".join(_help(name, field["description"]))
    # A file may omit these settings, because the environment can contain them.
    for model in (schema, schema["$defs"]["TargetSettings"]):
        del model["required"]
    schema["title"] = "Configuration of streamer"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _help(name: str, description: str) -> Iterator[str]:
    """Yield the description of a setting, and the meaning of each word that the setting accepts."""
    yield description
    if not description.startswith("Overrides"):
        for word, meaning in CHOICES.get(name, {}).items():
            yield f"- {word}: {meaning}"
