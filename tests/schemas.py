"""JSON schemas of every kind that answers are tested under."""

from __future__ import annotations

from typing import Any

SCHEMAS: dict[str, dict[str, Any]] = {
    "nested objects": {
        "type": "object",
        "properties": {
            "person": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 20},
                    "address": {
                        "type": "object",
                        "properties": {"city": {"type": "string", "maxLength": 20}, "zip": {"type": "integer"}},
                        "required": ["city", "zip"],
                        "additionalProperties": False,
                    },
                },
                "required": ["name", "address"],
                "additionalProperties": False,
            }
        },
        "required": ["person"],
        "additionalProperties": False,
    },
    "arrays of arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "maxItems": 4},
        "minItems": 2,
        "maxItems": 5,
    },
    "enums": {
        "type": "object",
        "properties": {
            "color": {"enum": ["red", "green", "blue"]},
            "size": {"enum": [1, 2.5, None, True]},
            "kind": {"const": "widget"},
        },
        "required": ["color", "size", "kind"],
        "additionalProperties": False,
    },
    "unicode keys": {
        "type": "object",
        "properties": {
            "größe": {"type": "integer"},
            "名前": {"type": "string", "maxLength": 12},
            "emoji 😀": {"enum": ["ü", "漢字", "\u2028"]},
        },
        "required": ["größe", "名前", "emoji 😀"],
        "additionalProperties": False,
    },
    "numbers with bounds": {
        "type": "object",
        "properties": {
            "percent": {"type": "integer", "minimum": 0, "maximum": 100},
            "ratio": {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
            "below": {"type": "number", "maximum": -3.25},
        },
        "required": ["percent", "ratio", "below"],
        "additionalProperties": False,
    },
    "optional fields": {
        "type": "object",
        "properties": {
            "a": {"type": "boolean"},
            "b": {"type": ["string", "null"]},
            "c": {"type": "array", "items": {"type": "boolean"}},
            "d": {"type": "null"},
        },
        "required": ["d"],
        "additionalProperties": False,
    },
    "any and one of": {
        "type": "array",
        "items": {
            "anyOf": [
                {"type": "integer"},
                {"type": "string", "maxLength": 8},
                {
                    "oneOf": [
                        {
                            "type": "object",
                            "properties": {"kind": {"const": "x"}, "x": {"type": "integer"}},
                            "required": ["kind", "x"],
                            "additionalProperties": False,
                        },
                        {
                            "type": "object",
                            "properties": {"kind": {"const": "y"}, "y": {"type": "null"}},
                            "required": ["kind", "y"],
                            "additionalProperties": False,
                        },
                    ]
                },
            ]
        },
        "minItems": 1,
        "maxItems": 6,
    },
    "recursion": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                },
                "required": ["value", "children"],
                "additionalProperties": False,
            }
        },
    },
    "patterns and formats": {
        "type": "object",
        "properties": {
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
            "mail": {"type": "string", "pattern": "^[a-z]+@[a-z]+[.]org$"},
            "day": {"type": "string", "format": "date"},
            "id": {"type": "string", "format": "uuid"},
        },
        "required": ["code", "mail", "day", "id"],
        "additionalProperties": False,
    },
    "open objects": {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": {"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 2},
    },
}
