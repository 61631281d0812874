"""Draws stories for children, and conversations about them, from a seeded grammar."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.train_demo import words
from benchmarks.train_demo.adventure_plans import ADVENTURE_PLANS
from benchmarks.train_demo.friendship_plans import FRIENDSHIP_PLANS
from benchmarks.train_demo.learning_plans import LEARNING_PLANS
from benchmarks.train_demo.words import StoryPlan

PLANS: tuple[StoryPlan, ...] = FRIENDSHIP_PLANS + LEARNING_PLANS + ADVENTURE_PLANS

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([Aa])~ (\w+)")
_SENTENCE_START = re.compile(r'(^|[.!?] "?|\." "?)([a-z])')

_CHILD_INTRODUCTIONS = (
    "Once upon a time there was a~ {trait} {child} named {hero}.",
    "Once there was a~ {trait} {child} who was called {hero}.",
    "There once was a~ {child} named {hero} who was very {trait}.",
    "{hero} was a~ {trait} {child} who lived [near|not far from] {the_home}.",
    "In a [small|white|tall|cozy] house near {the_home} lived a~ {trait} {child} named {hero}.",
    "{hero} was a~ {child} who [liked|loved] to [laugh|ask questions|sing|read|paint|run].",
)
_ANIMAL_INTRODUCTIONS = (
    "Once upon a time there was a~ {trait} {kind} named {hero}. "
    "{He} lived in a~ {kind_home} near {the_home}.",
    "Near {the_home} lived a~ {trait} {kind} who was called {hero}.",
    "{hero} was a~ {trait} {kind} who lived in a~ {kind_home}.",
    "Long ago, a~ {trait} {kind} named {hero} lived near {the_home}.",
)
_CLOSINGS = (
    "That night {hero} slept well and dreamed of {the_place}.",
    "It was the best day of the [week|year|whole summer].",
    "And {hero} and {pal} stayed friends [for ever|all their lives].",
    "{hero} and {pal} [smiled|sang|laughed] all the way home.",
    "{hero} told {his} {grown} all about it at bedtime.",
    "Then they all had [soup|pancakes|warm milk|cookies|apple pie] and went to bed.",
    "And that is how the story ends.",
)


@dataclass(frozen=True)
class Story:
    """A story, who and what it is about, and the questions that it answers."""

    text: str
    topic: str
    hero: str
    friend: str
    noun: str | None
    place: words.Place | None
    animal: str | None
    is_animal_hero: bool
    lesson: str
    answers: tuple[tuple[str, str], ...]


def with_articles(text: str) -> str:
    """Replace each ``a~`` by the article that fits the word after it."""

    def article(match: re.Match[str]) -> str:
        # "honest" is the only word of the vocabulary whose first sound and letter differ.
        ending = "n" if match[2][0] in "aeiou" or match[2] == "honest" else ""
        return f"{match[1]}{ending} {match[2]}"

    return _ARTICLE.sub(article, text)


def expand(template: str, slots: dict[str, str], rng: random.Random) -> str:
    """Make the choices of a template, fill its slots in and tidy its articles and capitals."""
    text = template
    while "[" in text or "{" in text:
        while _CHOICE.search(text):
            text = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), text)
        # A slot may hold a template of its own, hence the outer loop.
        text = text.format_map(slots)
    text = with_articles(text)
    return _SENTENCE_START.sub(lambda match: match[1] + match[2].upper(), text)


def _friend_phrase(
    rng: random.Random, friend: str, friend_kind: str | None, pronouns: words.Pronouns
) -> str:
    if friend_kind is not None:
        return rng.choice((f"{friend} the {friend_kind}", f"{{his}} friend {friend}"))
    relation = rng.choice(("friend", "best friend", pronouns.sibling, "cousin", "neighbor"))
    return f"{{his}} {relation} {friend}"


def story(rng: random.Random, *, hero: str | None = None, plan: StoryPlan | None = None) -> Story:
    """Draw one story, about the hero and with the plan given, if they are."""
    plan = plan or rng.choice(PLANS)
    hero = hero or rng.choice(tuple(words.NAMES))
    friend = rng.choice([name for name in words.NAMES if name != hero])
    his, hers = words.NAMES[hero], words.NAMES[friend]
    animals = tuple(words.ANIMALS)
    kind: str | None = None
    friend_kind: str | None = None
    if plan.animal_hero and rng.random() < 0.4:
        kind, friend_kind = rng.sample(animals, 2)
    animal = rng.choice(animals)
    place = rng.choice(plan.places)
    home = rng.choice([other for other in words.WILD if other != place])
    noun = rng.choice(plan.nouns)
    case = rng.choice(plan.cases)
    day, day2 = rng.sample(words.DAYS, 2)
    spots = rng.sample(place.spots, 3)
    slots = {
        "hero": hero, "he": his.subject, "He": his.subject.capitalize(), "him": his.object,
        "his": his.possessive, "His": his.possessive.capitalize(), "himself": his.reflexive,
        "was": his.was, "child": his.child, "trait": rng.choice(words.TRAITS),
        "pal": friend, "phe": hers.subject, "phim": hers.object, "phis": hers.possessive,
        "pal_intro": _friend_phrase(rng, friend, friend_kind, hers),
        "kind": kind or "", "kind_home": words.ANIMALS[kind] if kind else "",
        "animal": animal, "animal_home": words.ANIMALS[animal],
        "small": rng.choice(("small", "young", "little", "tiny", "gray", "brown")),
        "noun": noun, "obj": rng.choice(plan.looks) + " {noun}",
        "look": rng.choice(("bright", "strange", "familiar", "colorful")),
        "treasure": rng.choice(words.TREASURE_LOOKS) + " " + rng.choice(words.TREASURES),
        "place": place.noun, "the_place": f"the {place.noun}", "to_place": f"to the {place.noun}",
        "in_place": f"{place.preposition} the {place.noun}", "the_home": f"the {home.noun}",
        "spot1": spots[0], "spot2": spots[1], "spot3": spots[2],
        "day": day, "day2": day2, "evening": rng.choice(("evening", "night", "dark evening")),
        "grown": rng.choice(words.GROWN_UPS), "lesson": rng.choice(plan.lessons),
    } | case  # fmt: skip
    beats = [rng.choice(_ANIMAL_INTRODUCTIONS if kind else _CHILD_INTRODUCTIONS)]
    beats += [rng.choice(beat) for beat in plan.beats]
    if rng.random() < 0.6:
        closings = _CLOSINGS if plan.names_place else _CLOSINGS[1:]
        beats.append(rng.choice(closings))
    questions = (*plan.questions, ("What did {hero} learn?", "{hero} learned that {lesson}."))
    return Story(
        text=" ".join(expand(beat, slots, rng) for beat in beats),
        topic=plan.topic,
        hero=hero,
        friend=friend,
        noun=slots["noun"] if plan.names_noun else None,
        place=place if plan.names_place else None,
        animal=kind or (animal if plan.names_animal else None),
        is_animal_hero=kind is not None,
        lesson=slots["lesson"],
        answers=tuple(
            (expand(question, slots, rng), expand(answer, slots, rng))
            for question, answer in questions
        ),
    )


@dataclass(frozen=True)
class Document:
    """One training document: a plain story, or the turns of a conversation.

    ``turns`` holds (role, text) pairs and is empty for a plain story.
    """

    stories: tuple[Story, ...]
    turns: tuple[tuple[str, str], ...] = ()


_REQUESTS = (
    "[Tell|Please tell] me a story {about}.",
    "[Can|Could|Will] you tell me a story {about}?",
    "[I would like|I want] [to hear |]a story {about}[, please|].",
    "Write a [short |]story {about}.",
    "[Please make up|Make up] a story {about}.",
    "Tell a story {about}.",
)
_BARE_REQUESTS = (
    "[Tell|Please tell] me a [short |]story[, please|].",
    "[I would like|I want] a story[, please|].",
    "[Can|Could] you tell me a [bedtime |]story?",
)
_SMALL_TALK = (
    ("[Hello|Hi|Hello there|Good evening|Hey][!|.|]", "Hello! Would you like to hear a story?"),
    ("How are you?", "I am fine, thank you. Would you like to hear a story?"),
    ("[Who|What] are you?", "I am a small model that tells stories. Shall I tell you one?"),
    (
        "What can you do?",
        "I can tell short stories and answer questions about them. Shall I tell you one?",
    ),
    (
        "[What is the capital of France|What is two plus two|Who is the king|What time is it|"
        "How does a computer work|What is the weather like|Can you write code|What is the news]?",
        "I do not know that. I only know how to tell short stories.",
    ),
)
_AGREEMENTS = ("Yes, please.", "Yes!", "Yes, tell me a story.", "Please do.", "Yes, I would.")
_THANKS = ("Thank you!", "Thanks!", "That was nice.", "What a nice story!", "I liked that story.")
_THANKS_ANSWER = "You are welcome! I am glad that you liked it."


_ANNOUNCEMENTS = ("Here is a story {about}.", "This is a story {about}.")


def request(rng: random.Random, told: Story) -> tuple[str, str]:
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
        "in_place": f"{told.place.preposition} the {told.place.noun}" if told.place else "",
        "about": rng.choice(subjects),
    }
    if told.animal is not None and told.is_animal_hero:
        # "Mia and a fox" would speak of two characters, where Mia is the fox.
        slots["about"] = slots["about"].replace("{hero} and a~ {animal}", "{hero} the {animal}")
    return (
        expand(rng.choice(_REQUESTS), slots, rng),
        expand(rng.choice(_ANNOUNCEMENTS), slots, rng),
    )


def _second_turns(rng: random.Random, told: Story) -> Iterator[tuple[str, str, Story | None]]:
    """Yield (question, answer, new story if any) for one or more further exchanges."""
    kind = rng.random()
    if kind < 0.75:
        for question, answer in rng.sample(told.answers, rng.choice((1, 1, 2, 3))):
            yield question, answer, None
    elif kind < 0.85:
        yield rng.choice(_THANKS), _THANKS_ANSWER, None
    else:
        name = rng.choice((told.hero, told.friend, rng.choice(tuple(words.NAMES))))
        another = story(rng, hero=name)
        question = expand(
            "[Tell me another one|Another story|Now tell me one|Please tell another one] "
            "about {name}.",
            {"name": name},
            rng,
        )
        yield question, another.text, another


def conversation(rng: random.Random) -> Document:
    """Draw a conversation: a request, a story that fits it, and often further turns."""
    turns: list[tuple[str, str]] = []
    stories: list[Story] = []

    def exchange(question: str, answer: str) -> None:
        turns.extend((("user", question), ("assistant", answer)))

    told = story(rng)
    opening = rng.random()
    if opening < 0.06:
        question, answer = rng.choice(_SMALL_TALK)
        exchange(expand(question, {}, rng), answer)
        if not answer.endswith("?"):
            return Document((), tuple(turns))
        exchange(rng.choice(_AGREEMENTS), told.text)
    elif opening < 0.12:
        exchange(expand(rng.choice(_BARE_REQUESTS), {}, rng), told.text)
    else:
        question, announcement = request(rng, told)
        exchange(question, f"{announcement} {told.text}")
    stories.append(told)
    if rng.random() < 0.6:
        for question, answer, another in _second_turns(rng, told):
            exchange(question, answer)
            if another is not None:
                stories.append(another)
    return Document(tuple(stories), tuple(turns))


def documents(rng: random.Random, *, chat_share: float = 0.6) -> Iterator[Document]:
    """Yield an endless stream of plain stories and conversations."""
    while True:
        if rng.random() < chat_share:
            yield conversation(rng)
        else:
            yield Document((story(rng),))
