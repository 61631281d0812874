"""What a mask is: it hides a tensor before it leaves the TEE, and undoes that in the reply.

Four kinds. A *row mask* acts on the token axis and needs nothing from the server. A *feature mask*
acts on the hidden axis and needs a server that holds transformed weights. A *segment mask* does so
for whole layers at once. An *additive mask* adds what a product can take away again, and needs
unmasking factors, whose product the TEE or a dealer computes.

A mask is a frozen pydantic model; its fields are the options that a policy may set. It has to say,
as class attributes, what it claims and what breaks it. A new one is one file: see
docs/write-a-mask.md. The exact one, over the ring of 32-bit integers, is here: the one-time pad.
The bases of the other three kinds are in `tsqp.mask_kinds`. `find_mask` finds ours, those of
installed packages, and files.

Shape suffixes: T rows, I in_features, O out_features.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from pydantic import BaseModel

from protocol.errors import MaskError, PolicyError
from protocol.keystream import seeded
from protocol.messages import FUSED_MODULES, Arithmetic, RingLMHeadRequest
from protocol.prepared import Payload, PreparedRequest
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import site_number
from tee_side.words import Operator, PadsFrom, Site, is_projection

if TYPE_CHECKING:
    from protocol.model.checkpoint import Checkpoint
    from protocol.model.config import ModelConfig
    from protocol.model.weights import LightWeights
    from tee_side import plugins

Kind = Literal["row", "feature", "segment", "additive"]


@dataclass(frozen=True, slots=True)
class Seed:
    """Crosses in place of int32 elements of a shape [T, I], which the service makes of it.

    `key`: 32 bytes, fresh from the TEE's own generator for every input, and for no other.
    """

    key: bytes | bytearray = field(repr=False)
    shape: tuple[int, int]
    dtype: ClassVar[torch.dtype] = torch.int32

    def elements(self) -> torch.Tensor:
        """Return what the service makes of it."""
        return seeded([self.key], *self.shape).elements()

    def crossing(self, request: PreparedRequest) -> tuple[PreparedRequest, Payload]:
        """Return what crosses for a request of the elements: the seed's words, int32 [8].

        For the LM head, of which no service draws elements, they cross themselves: the reply is far
        larger.
        """
        if request.method == RingLMHeadRequest.method:
            return request, self.elements()
        return request.seeded, torch.frombuffer(bytearray(self.key), dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class Masked:
    """What crosses, to service and dealers, and how to turn the replies into the plain result.

    A `Seed` in place of ring elements crosses as 32 bytes, which the dealer expands.
    `unmask` must not write to the replies: where the result is refused, they say who is to blame.
    """

    sent: tuple[Payload | Seed, ...]
    unmask: Callable[..., torch.Tensor]


def as_it_is(y: torch.Tensor) -> torch.Tensor:
    """Unmask what was sent in the clear."""
    return y


def in_the_clear(x: torch.Tensor) -> Masked:
    """Send what no mask hides. GPU sees: the input itself."""
    return Masked((x,), as_it_is)


@dataclass(frozen=True, slots=True)
class Factors:
    """Prepared for one exchange: `r` [T, I] to add, and `u` = r W [T, O] to take away again."""

    # Not in a traceback or a log: either gives the input away to who saw what crossed.
    r: torch.Tensor = field(repr=False)
    u: torch.Tensor = field(repr=False)


# r int32 [T, I], uniform, and the seeds of the parts that it is the sum of, one for each dealer.
Dealt: TypeAlias = tuple[torch.Tensor, tuple[Seed, ...]]

# Hides the input of one linear operator.
Hide: TypeAlias = Callable[[torch.Tensor], Masked]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MaskKey:
    """The key of a provisioned mask, as the TEE uses it.

    Secret but for `provision_id`, the name that the service repeats, and `server_linear_digest`, of
    the weights that the service got (both SHA-256 in hex). `transforms`: hides each site's
    input, with fresh randomness for noise. `hide_states`: hides the hidden states that enter a
    segment, with randomness for the noise of each row, which is the same where a row is sent again;
    `unmask_logits`: of a segment that ends in logits.
    """

    provision_id: str
    server_linear_digest: str
    transforms: Mapping[Site, Callable[[torch.Tensor, Randomness], Masked]]
    hide_states: Callable[[torch.Tensor, Iterator[Randomness]], Masked] | None = None
    unmask_logits: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Given:
    """What a mask gets for the input of one site.

    `draw`: pads of a site, by its number, for so many rows; `deal`: instead, where dealers multiply
    them meanwhile, r and what each dealer is sent. `draw`, `deal`, `key`: None where there is none.
    """

    site: Site
    randomness: Randomness
    draw: Callable[[int, int], Factors] | None = None
    deal: Callable[[int, int], Dealt] | None = None
    key: MaskKey | None = None


class Mask(BaseModel, frozen=True, extra="forbid"):
    """Base of all masks; subclass one of the kinds, below or in `tsqp.mask_kinds`.

    Required class attributes:
      name         how policies name it
      hides        what it claims to hide
      known_break  what it is known not to hide, with the attack that breaks it
      broken       whether that attack recovers tokens where the weights are public
      source       paper, project or section that the scheme is from
      tolerance    largest |result - plain result| / max |plain result| in float32; 0 is exact
      cost         what it costs in the TEE, on the wire and at the server
    Optional, and False unless the class itself says so:
      uniform      whether what crosses is uniform random numbers, independent of the input
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    hides: ClassVar[str]
    known_break: ClassVar[str]
    broken: ClassVar[bool]
    uniform: ClassVar[bool] = False
    source: ClassVar[str]
    tolerance: ClassVar[float]
    cost: ClassVar[str]
    arithmetic: ClassVar[Arithmetic] = "float"

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        """Refuse a mask that does not say what it claims, when its file is loaded.

        Raises MaskError.
        """
        if "name" not in cls.__dict__:
            return  # one of the kinds
        required = ("kind", "hides", "known_break", "broken", "source", "tolerance", "cost")
        where = f"mask {cls.__name__}"
        MaskError.unless(
            "kind" not in cls.__dict__, where, "a kind of its own", "a base class, which has one"
        )
        missing = [attribute for attribute in required if not hasattr(cls, attribute)]
        missing += sorted(cls.__abstractmethods__)
        expected = "what every mask of its kind has to say and do"
        MaskError.unless(not missing, where, f"no {', '.join(missing)}", expected)
        MaskError.unless(
            isinstance(cls.broken, bool) and cls.tolerance >= 0,
            where,
            f"broken = {cls.broken!r}, tolerance = {cls.tolerance!r}",
            "True or False, and a number from 0",
        )
        # Not inherited: a subclass that sends something else would claim it without a word.
        cls.uniform = bool(cls.__dict__.get("uniform", False))
        MaskError.unless(
            not (cls.uniform and cls.broken),
            where,
            "uniform = True and broken = True",
            "one of them: uniform numbers tell nothing",
        )

    def hiding(self, given: Given) -> Hide:
        """Return what hides the input [T, I] of a linear operator.

        GPU sees: `Masked.sent` of what it returns. Raises PolicyError for what the mask needs and
        has not been given.
        """
        raise PolicyError(f"mask {self.name}", "a linear operator", "a mask that hides its input")

    @property
    def verifiable(self) -> bool:
        """Whether results are the plain ones within `tolerance`, with these options."""
        return True

    def described(self) -> str:
        """Return name and all options: equal for equal masks, and for no others."""
        return describe_mask(self.name, self.model_dump(mode="json"))

    @classmethod
    def supports(cls, operator: Operator) -> bool:
        """Say whether the mask works on an operator; the layers' linear ones by default."""
        return operator in FUSED_MODULES


def describe_mask(name: str, options: dict[str, Any]) -> str:
    """Return what `Mask.described` does, for a mask that is known by its fields alone."""
    # JSON says where a value ends: no two sets of options look alike.
    values = (f"{key}={json.dumps(options[key], sort_keys=True)}" for key in sorted(options))
    return " ".join([name, *values])


class AdditiveMask(Mask):
    """Adds a random r before, takes u = r W away after; each (r, u) is used once."""

    kind: ClassVar[Kind] = "additive"

    @property
    def dealt(self) -> bool:
        """Whether dealers multiply u, and not the TEE."""
        return False

    def made(self, source: PadsFrom) -> bool:
        """Say whether its pads were made before, where rows have theirs from this source."""
        return source == "stock" or (source == "dealers" and not self.dealt)

    @abstractmethod
    def draw(self, words_TI: torch.Tensor) -> torch.Tensor:
        """Turn words of the pads' keystream, int32 and uniform, into r of the same shape."""

    @abstractmethod
    def mask(self, x_TI: torch.Tensor, factors: Factors) -> Masked:
        """Hide the input. GPU sees: `Masked.sent`."""

    def hiding(self, given: Given) -> Hide:
        """See `Mask.hiding`."""
        number, draw = site_number(*given.site), given.draw
        if draw is None:
            raise PolicyError(f"mask {self.name}", "no factors", "pads made in advance")
        return lambda x_TI: self.mask(x_TI, draw(number, x_TI.shape[0]))


class ProvisionedMask(Mask):
    """Needs a server whose weights were transformed ahead, and the key that undoes that."""

    @abstractmethod
    def load_key(
        self,
        path: Path | None,
        config: ModelConfig,
        checkpoint: Checkpoint,
        light: Sequence[LightWeights],
    ) -> MaskKey:
        """Read the key of this mask and model. `light`: of each layer, from the TEE's own model.

        Raises SettingsError for no path, FeatureKeyError, and MaskError for a norm that the mask
        cannot fold.
        """


class Pad(AdditiveMask):
    """Send x + r mod 2^32 with r uniform, and subtract r W from the reply.

    What crosses is uniform whatever x is, because r is, and because no r is used twice. Integers
    wrap exactly, so the result is that of the plain product. Who multiplies u = r W is said by
    `pads`: the TEE ("tee"), ahead of use; or dealers ("dealt"), services of other owners, each of
    which gets a seed of its part of r: then a call needs none of the TEE's products.
    """

    pads: Literal["tee", "dealt"] = "tee"

    name: ClassVar[str] = "pad"
    hides: ClassVar[str] = (
        "every value: what crosses to the service is uniform and independent of the input, and what"
        " crosses to a dealer does not depend on it at all"
    )
    known_break: ClassVar[str] = (
        "none while every pad is used once; a host that restores an old index file of a pad bank"
        " makes pads repeat (docs/limitations.md); where pads are dealt, the service and all"
        " dealers together know everything, also later, from what they recorded; lengths and timing"
        " stay visible, and whether and when a service answers is its own choice; where the policy"
        " does not verify results, one that lies learns from whether the run then fails (end of"
        " text, numbers that are not finite)"
    )
    broken: ClassVar[bool] = False
    uniform: ClassVar[bool] = True
    source: ClassVar[str] = (
        "one-time pad; with precomputed r W: Slalom, arXiv 1806.03287; dealt: additive secret"
        " sharing over Z_2^32"
    )
    tolerance: ClassVar[float] = 0.0
    cost: ClassVar[str] = (
        "two passes in the TEE; one int8 product a pad, made ahead; dealt: a seed and a reply more"
        " a call instead"
    )
    arithmetic: ClassVar[Arithmetic] = "int8"

    @property
    def dealt(self) -> bool:
        """See `AdditiveMask.dealt`."""
        return self.pads == "dealt"

    @classmethod
    def supports(cls, operator: Operator) -> bool:
        """Linear operators and the LM head."""
        return is_projection(operator)

    def described(self) -> str:
        """See `Mask.described`; banks of before know no option."""
        return super().described() if self.dealt else self.name

    def draw(self, words_TI: torch.Tensor) -> torch.Tensor:
        """Take the words as they are: uniform over the ring."""
        return words_TI

    def mask(self, x_TI: torch.Tensor, factors: Factors) -> Masked:
        """Add the pad. GPU sees: uniform ring elements."""
        return Masked((x_TI + factors.r,), lambda y_TO: y_TO - factors.u)

    def hiding(self, given: Given) -> Hide:
        """See `Mask.hiding`. GPU sees: uniform ring elements; a dealer: a fresh seed."""
        number, deal = site_number(*given.site), given.deal
        if deal is None:
            return super().hiding(given)

        def hide(x_TI: torch.Tensor) -> Masked:
            r_TI, seeds = deal(number, x_TI.shape[0])
            return Masked((x_TI + r_TI, *seeds), lambda y_TO, *dealt: y_TO - sum(dealt))

        return hide


BUILTIN: dict[str, type[Mask]] = {Pad.name: Pad}


@cache
def all_masks() -> plugins.Kind[Mask]:
    """Return what finds masks by name, of installed packages as well."""
    from tee_side import plugins  # of no use to a run under our own masks

    return plugins.Kind(Mask, "mask", "a mask kind", MaskError, group="tsqp.masks", builtin=BUILTIN)


def is_path(name: str) -> bool:
    """Say whether a person means a file, and nothing by its name."""
    return "/" in name or name.endswith(".py")


def find_mask(name_or_path: str, folder: Path | None = None) -> type[Mask]:
    """Return a mask class by name, or from a Python file by its path (it has a `/` or `.py`).

    A relative path is looked up from `folder`, which is the policy file's. `FILE.py:Class` picks
    one of several in a file. Of installed packages only the one that brings the name is imported,
    and none for a name of ours: a policy that asks for `pad` gets the one it was written for.
    Raises MaskError, and PluginError for a file or package that does not load.
    """
    if name_or_path in BUILTIN:
        return BUILTIN[name_or_path]
    MaskError.unless(
        name_or_path != "shares",
        "mask",
        "'shares'",
        """mask = { name = "pad", pads = "dealt" }, which took its place""",
    )
    path_text, _, wanted = name_or_path.partition(":")
    if not is_path(path_text):
        return all_masks().named(name_or_path)
    from tee_side.plugins import classes_in, load_module

    path = (folder or Path()) / path_text
    masks = classes_in(load_module(path), Mask)
    found = [mask for mask in masks if wanted in ("", mask.__name__)]
    names = ", ".join(mask.__name__ for mask in found) or "none"
    MaskError.unless(
        len(found) == 1,
        str(path),
        f"{len(found)} masks ({names})",
        f"one named {wanted}" if wanted else "one (FILE.py:Class picks one)",
    )
    return found[0]


if not TYPE_CHECKING:  # a type checker would take every name for one of this module's
    # Tells authors of masks where the bases went that were here.
    def __getattr__(name: str) -> object:
        moved = (
            "RowMask MaskedProduct FeatureMask FeatureSite KeyedTransform SegmentMask KeyedSegment"
        )
        if name in moved.split():
            raise ImportError(f"{name} is in tsqp.mask_kinds")
        raise AttributeError(name)
