"""Command-line options of the recipes: dataclasses read by TRL's parser, YAML first, the command line over it."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from trl import ModelConfig, TrlParser, get_peft_config

from mini_rome.errors import ConfigError, MiniRomeError, about_file

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


class OptionsParser(TrlParser):
    """TrlParser with errors that name the option, a help that fits a screen, and unknown YAML keys refused."""

    def __init__(self, description: str, dataclass_types: Sequence[type], own: Sequence[type]) -> None:
        """own: the classes whose fields `--help` explains; `--help_all` explains every inherited one too."""
        super().__init__(list(dataclass_types), description=description, add_help=False, allow_abbrev=False)
        self.own = own

    def parse(self, arguments: Sequence[str] | None = None) -> tuple[Any, ...]:
        """One instance per dataclass. Raises ConfigError; exits 0 after --help."""
        words = list(sys.argv[1:] if arguments is None else arguments)
        if "--help" in words or "-h" in words:
            print(self.short_help())
            raise SystemExit(0)
        if "--help_all" in words:
            self.print_help()
            raise SystemExit(0)
        try:
            *parsed, unknown = self.parse_args_and_config(words, return_remaining_strings=True)
        except (IndexError, FileNotFoundError, IsADirectoryError) as error:
            raise ConfigError(f"--config: {error}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"--config: not YAML ({str(error).splitlines()[0]})") from error
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if unknown:
            near = difflib.get_close_matches(unknown[0], self._option_string_actions, n=1)
            self.error(f"unknown option {unknown[0]}" + (f", did you mean {near[0]}?" if near else ""))
        return tuple(parsed)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help lists the options)")

    def short_help(self) -> str:
        """The description, then every option of the own classes with its default."""
        lines = [(self.description or "").strip(), "", "Options:"]
        for own in self.own:
            inherited = {entry.name for base in own.__mro__[1:] if dataclasses.is_dataclass(base)
                         for entry in dataclasses.fields(base)}
            declared = own.__dict__.get("__annotations__", {})
            for entry in dataclasses.fields(own):
                if entry.name in declared or entry.name not in inherited:
                    lines += self._entry(entry)
        lines += ["", "  --config FILE   options from YAML; the command line goes first",
                  "  --help_all      also the options inherited from TRL and transformers"]
        return "\n".join(lines)

    @staticmethod
    def _entry(entry: dataclasses.Field) -> list[str]:
        default = entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        text = f"{entry.metadata.get('help', '')} [{shown}]"
        body = textwrap.wrap(text, width=86)
        name = f"  --{entry.name}"
        first = [f"{name:<28}{body[0]}"] if len(name) < 27 else [name, " " * 28 + body[0]]
        return [*first, *(" " * 28 + line for line in body[1:])]


def guarded(main: Callable[[], None]) -> NoReturn:
    """Run a recipe's main: an error on purpose, or of a file, ends with its text and exit code 2, Ctrl-C with 130."""
    try:
        main()
    except MiniRomeError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if (told := about_file(error)) is None:
            raise
        print(f"{Path(sys.argv[0]).name}: {told}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: stopped", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


def lora_config(model: ModelConfig) -> Any:
    """The LoRA adapter that the options ask for, or None.

    Attention only by default, since `all-linear` reaches the router of a Mixture of Experts; experts are opt-in by
    --lora_target_parameters. TRL's default dropout of 0.05 is refused by expert adapters, so it is 0 unless given.
    """
    if not model.use_peft:
        return None
    if model.lora_target_modules is None:
        model.lora_target_modules = ATTENTION
    if model.lora_target_parameters is not None:
        model.lora_dropout = 0.0
    return get_peft_config(model)
