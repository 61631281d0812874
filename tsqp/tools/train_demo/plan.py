"""The shape of one kind of story: beats of clause templates, lessons and questions.

``[x|y]`` chooses one of the texts, ``{slot}`` is filled in from the story's characters and
things, and ``a~`` becomes "a" or "an". Each beat is a tuple of alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass

from tsqp.tools.train_demo import vocabulary as words

Beat = tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """One kind of story: its beats, its lessons and the questions that it answers."""

    topic: str
    beats: tuple[Beat, ...]
    lessons: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]
    nouns: tuple[str, ...] = words.TOYS
    looks: tuple[str, ...] = words.COLORS + words.QUALITIES
    places: tuple[words.Place, ...] = words.PLACES
    cases: tuple[dict[str, str], ...] = ({},)
    animal_hero: bool = False
    names_noun: bool = True
    names_place: bool = True
    names_animal: bool = False


THANKS = (
    '"Thank you[ so much| for your help|, my friend]!" [said|cried] {hero}.',
    '{hero} hugged {pal} and said, "Thank you [so much|for helping me]!"',
    '"I [could not have done it|would never have done it] without you," {hero} told {pal}.',
)
WENT = ("Where did {hero} go?", "{hero} went {to_place}.")
HELPED = ("Who helped {hero}?", "{pal} helped {hero}.")
