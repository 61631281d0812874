"""The text that the demo model is trained on: stories for children, and conversations about them.

stories.toml has the grammar; everything here draws from it with a seeded generator, so that a seed
gives the same text bit for bit. The order of draws is part of that.
"""

import random
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GRAMMAR: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_WORDS: dict[str, list[str]] = _GRAMMAR["words"]
_TEXTS: dict[str, list[Any]] = _GRAMMAR["texts"]
_COMMON: dict[str, list[Any]] = _GRAMMAR["common"]
_ANIMALS: dict[str, str] = _GRAMMAR["animals"]
_PLACES: dict[str, list[str]] = _GRAMMAR["places"]
# The pronouns that each name goes by.
_NAMES: dict[str, dict[str, str]] = {
    name: pronouns for pronouns in _GRAMMAR["names"] for name in pronouns["names"]
}
_PLAN_DEFAULTS = {
    "nouns": "toys",
    "looks": [*_WORDS["colors"], *_WORDS["qualities"]],
    "wild": False,
    "cases": [{}],
    "animal_hero": False,
    "names_noun": True,
    "names_place": True,
    "names_animal": False,
}
_PLANS: list[dict[str, Any]] = [_PLAN_DEFAULTS | plan for plan in _GRAMMAR["plans"]]
_CHAT_SHARE = 0.6

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([Aa])~ (\w+)")
_SENTENCE_START = re.compile(r'(^|[.!?] "?|\." "?)([a-z])')

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
USER, ASSISTANT, END_OF_TURN = "<|user|>", "<|assistant|>", "<|end_of_turn|>"
SPECIAL_TOKENS = (BEGIN, END, USER, ASSISTANT, END_OF_TURN)
_SPECIAL = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Story:
    """A story, the words that it is about, and the questions that it answers.

    `place`: with its preposition; None, as `noun` and `animal`, where the story names none.
    """

    text: str
    topic: str
    hero: str
    friend: str
    noun: str | None
    place: str | None
    animal: str | None
    is_animal_hero: bool
    answers: tuple[tuple[str, str], ...]


def expand(template: str, slots: dict[str, str], rng: random.Random) -> str:
    """Make the choices of a template, fill its slots in and tidy its articles and capitals."""
    text = template
    while "[" in text or "{" in text:
        while _CHOICE.search(text):
            text = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), text)
        # A slot may hold a template of its own, hence the outer loop.
        text = text.format_map(slots)
    # "honest" is the only word of the vocabulary whose first sound and letter differ.
    text = _ARTICLE.sub(
        lambda match: (
            f"{match[1]}{'n' * (match[2][0] in 'aeiou' or match[2] == 'honest')} {match[2]}"
        ),
        text,
    )
    return _SENTENCE_START.sub(lambda match: match[1] + match[2].upper(), text)


def _listed(value: str | list[Any], lists: dict[str, list[Any]]) -> list[Any]:
    """Return what a plan lists: itself, or by the name of one of the grammar's lists."""
    return lists[value] if isinstance(value, str) else value


def _friend_phrase(rng: random.Random, friend: str, kind: str | None, sibling: str) -> str:
    if kind is not None:
        return rng.choice((f"{friend} the {kind}", f"{{his}} friend {friend}"))
    relation = rng.choice(("friend", "best friend", sibling, "cousin", "neighbor"))
    return f"{{his}} {relation} {friend}"


def story(rng: random.Random, hero: str | None = None) -> Story:
    """Draw one story, about the hero if one is given."""
    plan = rng.choice(_PLANS)
    hero = hero or rng.choice(tuple(_NAMES))
    friend = rng.choice([name for name in _NAMES if name != hero])
    his, hers = _NAMES[hero], _NAMES[friend]
    kind: str | None = None
    friend_kind: str | None = None
    if plan["animal_hero"] and rng.random() < 0.4:
        kind, friend_kind = rng.sample(tuple(_ANIMALS), 2)
    animal = rng.choice(tuple(_ANIMALS))
    place = rng.choice(_WORDS["wild"] if plan["wild"] else tuple(_PLACES))
    preposition, *spots = _PLACES[place]
    home = rng.choice([other for other in _WORDS["wild"] if other != place])
    noun = rng.choice(_listed(plan["nouns"], _WORDS))
    case = rng.choice(plan["cases"])
    day, day2 = rng.sample(_WORDS["days"], 2)
    spots = rng.sample(spots, 3)
    slots = {
        "hero": hero, "he": his["subject"], "He": his["subject"].capitalize(),
        "him": his["object"], "his": his["possessive"], "His": his["possessive"].capitalize(),
        "himself": his["reflexive"], "was": his["was"], "child": his["child"],
        "trait": rng.choice(_WORDS["traits"]),
        "pal": friend, "phe": hers["subject"], "phim": hers["object"], "phis": hers["possessive"],
        "pal_intro": _friend_phrase(rng, friend, friend_kind, hers["sibling"]),
        "kind": kind or "", "kind_home": _ANIMALS[kind] if kind else "",
        "animal": animal, "animal_home": _ANIMALS[animal],
        "small": rng.choice(("small", "young", "little", "tiny", "gray", "brown")),
        "noun": noun, "obj": rng.choice(_listed(plan["looks"], _WORDS)) + " {noun}",
        "look": rng.choice(("bright", "strange", "familiar", "colorful")),
        "treasure": rng.choice(_WORDS["treasure_looks"]) + " " + rng.choice(_WORDS["treasures"]),
        "place": place, "the_place": f"the {place}", "to_place": f"to the {place}",
        "in_place": f"{preposition} the {place}", "the_home": f"the {home}",
        "spot1": spots[0], "spot2": spots[1], "spot3": spots[2],
        "day": day, "day2": day2, "evening": rng.choice(("evening", "night", "dark evening")),
        "grown": rng.choice(_WORDS["grown_ups"]), "lesson": rng.choice(plan["lessons"]),
    } | case  # fmt: skip
    beats = [rng.choice(_TEXTS["animal_introductions" if kind else "child_introductions"])]
    beats += [rng.choice(_listed(beat, _COMMON)) for beat in plan["beats"]]
    if rng.random() < 0.6:
        # The first closing speaks of the place.
        beats.append(rng.choice(_TEXTS["closings"][0 if plan["names_place"] else 1 :]))
    questions = [*plan["questions"], ["What did {hero} learn?", "{hero} learned that {lesson}."]]
    text = " ".join(expand(beat, slots, rng) for beat in beats)
    answers = []
    for asked in questions:
        question, answer = (expand(one, slots, rng) for one in _listed(asked, _COMMON))
        answers.append((question, answer))
    return Story(
        text=text,
        topic=plan["topic"],
        hero=hero,
        friend=friend,
        noun=slots["noun"] if plan["names_noun"] else None,
        place=slots["in_place"] if plan["names_place"] else None,
        animal=kind or (animal if plan["names_animal"] else None),
        is_animal_hero=kind is not None,
        answers=tuple(answers),
    )


def _request(rng: random.Random, told: Story) -> tuple[str, str]:
    """Ask for the story told, by hero, thing, animal, place, friend or topic.

    Returns the request and the sentence that opens its answer, which repeats what was asked for: a
    small model keeps to a subject that it has just named.
    """
    subjects = ["about {hero}", "about {hero} and {friend}", "about {topic}"]
    if told.noun is not None:
        subjects += ["about {hero} and a~ {noun}", "about a~ {noun}"] * 2
    if told.animal is not None:
        subjects += ["about a~ {animal}", "about {hero} and a~ {animal}"] * 2
        if told.noun is not None:
            subjects.append("about a~ {animal} and a~ {noun}")
    if told.place is not None:
        subjects += ["that happens {in_place}", "about {hero} {in_place}"]
    slots = {
        "hero": told.hero,
        "friend": told.friend,
        "topic": told.topic,
        "noun": told.noun or "",
        "animal": told.animal or "",
        "in_place": told.place or "",
        "about": rng.choice(subjects),
    }
    if told.animal is not None and told.is_animal_hero:
        # "Mia and a fox" would speak of two characters, where Mia is the fox.
        slots["about"] = slots["about"].replace("{hero} and a~ {animal}", "{hero} the {animal}")
    asked = expand(rng.choice(_TEXTS["requests"]), slots, rng)
    return asked, expand(rng.choice(_TEXTS["announcements"]), slots, rng)


def _conversation(rng: random.Random) -> tuple[list[Story], list[tuple[str, str]]]:
    """Draw a conversation: a request, a story that fits it, and often further turns.

    Returns its stories, and what was asked and said.
    """
    exchanges: list[tuple[str, str]] = []
    told = story(rng)
    stories = [told]
    opening = rng.random()
    if opening < 0.06:
        question, answer = rng.choice(_TEXTS["small_talk"])
        exchanges.append((expand(question, {}, rng), answer))
        if not answer.endswith("?"):
            return [], exchanges
        exchanges.append((rng.choice(_TEXTS["agreements"]), told.text))
    elif opening < 0.12:
        exchanges.append((expand(rng.choice(_TEXTS["bare_requests"]), {}, rng), told.text))
    else:
        question, announcement = _request(rng, told)
        exchanges.append((question, f"{announcement} {told.text}"))
    if rng.random() < 0.6:
        kind = rng.random()
        if kind < 0.75:
            exchanges += rng.sample(told.answers, rng.choice((1, 1, 2, 3)))
        elif kind < 0.85:
            exchanges.append((rng.choice(_TEXTS["thanks"]), _GRAMMAR["texts"]["thanks_answer"]))
        else:
            name = rng.choice((told.hero, told.friend, rng.choice(tuple(_NAMES))))
            another = story(rng, name)
            question = expand(_GRAMMAR["texts"]["another"], {"name": name}, rng)
            exchanges.append((question, another.text))
            stories.append(another)
    return stories, exchanges


def _documents(rng: random.Random) -> Iterator[tuple[list[Story], str]]:
    """Yield plain stories and conversations for ever: their stories, and the text to train on."""
    while True:
        if rng.random() < _CHAT_SHARE:
            stories, exchanges = _conversation(rng)
            turns = (
                USER + asked + END_OF_TURN + ASSISTANT + said + END_OF_TURN
                for asked, said in exchanges
            )
            yield stories, BEGIN + "".join(turns) + END
        else:
            told = story(rng)
            yield [told], BEGIN + told.text + END


def without_special_tokens(text: str) -> str:
    """Remove every special token from a document."""
    return _SPECIAL.sub("", text)


class Corpus:
    """Validation documents, and training streams that share no story with them."""

    def __init__(self, seed: int, validation_documents: int) -> None:
        """Draw the validation documents; `seed` fixes these and all the streams."""
        self._seed = seed
        self.validation: list[str] = []
        self._held_out: set[str] = set()
        stream = _documents(random.Random(f"validation {seed}"))  # noqa: S311 - no secret
        while len(self.validation) < validation_documents:
            stories, text = next(stream)
            # A document without a story is small talk, which training repeats word for word.
            if stories:
                self.validation.append(text)
                self._held_out.update(one.text for one in stories)

    def texts(self, purpose: str) -> Iterator[str]:
        """Yield training documents for ever; each purpose has a stream of its own."""
        for stories, text in _documents(random.Random(f"{purpose} {self._seed}")):  # noqa: S311
            if not any(one.text in self._held_out for one in stories):
                yield text

    def rows(
        self, purpose: str, encode: Encode, length: int, *, aligned: bool
    ) -> Iterator[list[int]]:
        """Yield rows of so many tokens, cut from the concatenated documents.

        `aligned`: a row begins with a document, as every prompt does, and what is left of its last
        one is dropped. Otherwise no token is lost between rows.
        """
        buffer: list[int] = []
        for text in self.texts(purpose):
            buffer += encode(text)
            while len(buffer) >= length:
                yield buffer[:length]
                buffer = [] if aligned else buffer[length:]
