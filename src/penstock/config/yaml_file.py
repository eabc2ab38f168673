"""Read a configuration file: plain YAML, with errors that name the file."""

from pathlib import Path
from typing import Any

import yaml

from penstock.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Plain YAML that rejects repeated keys: otherwise one of two routes with the same name would
    vanish unnoticed.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        given = [
            self.construct_object(key, deep=True)
            for key, _ in node.value
            if key.tag != "tag:yaml.org,2002:merge"
        ]
        for at, name in enumerate(given):
            if name in given[:at]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{name!r} is given twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


def read(file: Path) -> Any:
    """Return what is in the file; None for an empty one."""
    try:
        return yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from error
