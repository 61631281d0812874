"""What an image is made of, by SHA-256: packages of Debian and wheels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, TypeAlias
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError, model_validator

from protocol.errors import SettingsError
from protocol.validation import first_problem
from tsqp.deploy.image import Suite

_Digest: TypeAlias = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


class Artifact(BaseModel):
    """A file of somebody else's, whose content is known before it is fetched."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    version: str
    url: str
    sha256: _Digest

    @property
    def file(self) -> str:
        """Its name in a folder of saved packages."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])

    @model_validator(mode="after")
    def _file_is_a_name(self) -> Artifact:
        if "/" in self.file or not self.file.endswith((".deb", ".whl")):
            raise ValueError("a url that ends in the name of a package")
        return self


class Lock(BaseModel):
    """Everything that a build reads beside this project's source.

    `root`: installed in the image. `tools`: what builds it, by packages as well, so that its bits
    are no matter of the machine that builds. `build`: wheels that build ours.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    suite: Suite
    kernel: Artifact
    root: tuple[Artifact, ...]
    tools: tuple[Artifact, ...]
    wheels: tuple[Artifact, ...] = ()
    build: tuple[Artifact, ...] = ()

    @property
    def small(self) -> bool:
        """Whether there is no runner in it."""
        return not self.wheels

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """All of them, each once."""
        every = (self.kernel, *self.root, *self.tools, *self.wheels, *self.build)
        return tuple(dict.fromkeys(every))

    def to_bytes(self) -> bytes:
        """Return the content of a lock file."""
        return (json.dumps(self.model_dump(), indent=1) + "\n").encode()

    @classmethod
    def load(cls, path: Path) -> Lock:
        """Read a lock file. Raises SettingsError."""
        try:
            return cls.model_validate(json.loads(path.read_bytes()))
        except OSError as error:
            got = error.strerror or type(error).__name__
            raise SettingsError(str(path), got=got, expected="a lock file") from None
        except ValidationError as error:
            problem = first_problem(error, cls.model_fields)
            where = f"{path}: {problem.field}" if problem.field else str(path)
            raise SettingsError(where, got=problem.got, expected=problem.expected) from None
        except ValueError:
            raise SettingsError(str(path), got="another content", expected="JSON") from None
