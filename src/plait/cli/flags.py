"""Flags made from the fields of `Plan`, and the plan made from defaults, a TOML file and flags, in that order."""

from __future__ import annotations

import inspect
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin

import typer

from ..design.errors import PlanError
from ..design.plan import Plan
from .limits import refuse_sizes

Values = dict[str, Any]


def takes_plan(
    command: Callable[..., Any], *, defaults: Values | None = None, without: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Gives `command(given, **own)` one flag per field of the plan but those `without` a meaning for it; `given` holds
    the values that were written, with `config` among them. `defaults` are shown in place of the plan's own."""

    signature = inspect.signature(command, eval_str=True)
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in list(signature.parameters.values())[1:]]

    def with_flags(**arguments: Any) -> Any:
        extra = {parameter.name: arguments.pop(parameter.name) for parameter in own}
        given = {name: value for name, value in arguments.items() if value is not None}
        return command(given, **extra)

    shown = {name: field.default for name, field in Plan.model_fields.items() if name not in without} | (defaults or {})
    parameters = [_flag(name, Plan.model_fields[name], default) for name, default in shown.items()]
    parameters.append(_keyword("config", Path, typer.Option(None, help="A TOML file with the same names; flags win.")))
    with_flags.__signature__ = inspect.Signature([*parameters, *own])  # type: ignore[attr-defined]
    with_flags.__doc__ = command.__doc__
    return with_flags


def _flag(name: str, field: Any, default: Any) -> inspect.Parameter:
    kind = str if get_origin(field.annotation) is not None else field.annotation
    if name == "model":
        return _keyword(name, kind, typer.Argument(None, help=field.description, show_default=False))
    flag = name.replace("_", "-")
    names = ["-n", "--ranks"] if name == "ranks" else [f"--{flag}"]
    if bool in get_args(field.annotation):  # yes, no, or the plan's word for whoever says neither
        kind, names = bool, [f"--{flag}/--no-{flag}"]
    text = f"{field.description} [default: {default}]"
    return _keyword(name, kind, typer.Option(None, *names, help=text, show_default=False))


def _keyword(name: str, kind: type, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind | None)


def resolve(given: Values, defaults: Values | None = None) -> tuple[Plan, dict[str, str]]:
    """The plan and the origin of each of its values; `defaults` stand in for the plan's own."""
    flags = {key: value for key, value in given.items() if key != "config"}
    file: Path | None = given.get("config")
    written = _read_toml(file) if file is not None else {}
    # Each source by itself first, so that a bad value is blamed on the place where it stands.
    if file is not None:
        Plan.read(written, source=str(file))
    plan = Plan.read({**(defaults or {}), **written, **flags}, source="the command line")
    refuse_sizes(plan)
    origin = dict.fromkeys(Plan.model_fields, "default")
    origin |= dict.fromkeys(defaults or {}, "command")
    origin |= dict.fromkeys(written, str(file)) | dict.fromkeys(flags, "flag")
    return plan, origin


def named(origin: dict[str, str], command: str) -> None:
    """Refuses a run whose model nobody chose: it would take its hours on the wrong one."""
    if origin["model"] == "default":
        raise PlanError(
            f"plait {command} needs a MODEL: a preset (llama-tiny, say), a directory with a config.json, or a hub id."
        )


def _read_toml(file: Path) -> Values:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"The configuration {file} cannot be read: {os.strerror(error.errno or 0).lower()}.") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, nested without end, or a number without end
        raise PlanError(f"{file} is not valid TOML: {str(error)[:1].lower()}{str(error)[1:]}.") from None
