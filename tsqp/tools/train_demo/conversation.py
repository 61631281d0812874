"""Documents for training: plain stories and conversations about stories."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tsqp.tools.train_demo.grammar import Story, expand, story
from tsqp.tools.train_demo.vocabulary import NAMES


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
        name = rng.choice((told.hero, told.friend, rng.choice(tuple(NAMES))))
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
