"""Tests of the story grammar and of the documents made from it."""

import itertools
import random
import re

import pytest

from tests.kit.rows import each_row
from tsqp.tools.train_demo.conversation import Document, conversation, documents, request
from tsqp.tools.train_demo.grammar import PLANS, Story, expand, story, with_articles
from tsqp.tools.train_demo.plan import Plan
from tsqp.tools.train_demo.vocabulary import HE, NAMES, SHE, THEY

# Words of the answers that the stories say in another way.
_ANSWER_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an and argued because belonged both brought build built did do end find first found "
        "gave had happened happy help helped honest in it learned lived lost made make no not "
        "of once planted practiced present said she he they the their them to told up wait want "
        "wanted was were who with yes hid take took went loved at be for on birthday where grow "
        "but give that his her s by shared",
    )
)


@pytest.fixture(scope="module")
def stories() -> list[Story]:
    rng = random.Random(11)
    return [story(rng) for _ in range(2000)]


@pytest.fixture(scope="module")
def conversations() -> list[Document]:
    rng = random.Random(12)
    return [conversation(rng) for _ in range(500)]


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


def test_same_seed_gives_same_documents() -> None:
    first, second = (list(itertools.islice(documents(random.Random(3)), 100)) for _ in range(2))
    other = list(itertools.islice(documents(random.Random(4)), 100))
    assert first == second
    assert first != other


def test_stories_are_distinct(stories: list[Story]) -> None:
    assert len({told.text for told in stories}) > 1990


def test_story_length(stories: list[Story]) -> None:
    lengths = [len(told.text.split()) for told in stories]
    assert min(lengths) >= 60
    assert max(lengths) <= 180
    assert 80 <= sum(lengths) / len(lengths) <= 150


@each_row("plan", PLANS, ids=lambda plan: plan.topic)
def test_every_plan_expands_fully(plan: Plan) -> None:
    rng = random.Random(5)
    for _ in range(50):
        told = story(rng, plan=plan)
        texts = [told.text, *itertools.chain.from_iterable(told.answers)]
        for text in texts:
            assert not re.search(r"[\[\]{}|~]|  | [,.!?]|\.\.", text), text
            assert text[0].isupper() or text[0] == '"', text
            assert text.count('"') % 2 == 0, text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a~ owl", "an owl"),
        ("A~ kite", "A kite"),
        ("a~ honest boy", "an honest boy"),
        ("A~ old hat", "An old hat"),
    ],
)
def test_articles(text: str, expected: str) -> None:
    assert with_articles(text) == expected


def test_articles_fit_in_all_stories(stories: list[Story]) -> None:
    for told in stories:
        assert not re.search(r"\b[Aa] [aeiou]", told.text), told.text
        assert not re.search(r"\b[Aa]n (?!honest|hour)[^aeiou]", told.text), told.text


def test_expand_capitalizes_sentences_but_not_speech_tags() -> None:
    text = expand('{spot} it was. "Go!" {he} said. "Why?" asked Mia.', _slots(), random.Random(0))
    assert text == 'Under a log it was. "Go!" he said. "Why?" asked Mia.'


def _slots() -> dict[str, str]:
    return {"spot": "under a log", "he": "he"}


def test_pronouns_agree_with_the_characters(stories: list[Story]) -> None:
    for told in stories:
        present = {NAMES[told.hero], NAMES[told.friend]}
        used = _words(told.text) | _words(" ".join(itertools.chain(*told.answers)))
        if HE not in present:
            assert not used & {"he", "him", "his", "himself", "boy"}, told.text
        if SHE not in present:
            assert not used & {"she", "her", "herself", "girl"}, told.text
        if THEY not in present:
            assert "themself" not in used, told.text
        assert not re.search(r"\b[Tt]hey was\b|\b([Hh]e|[Ss]he) were\b", told.text), told.text


def test_things_are_spoken_of_again(stories: list[Story]) -> None:
    for told in stories:
        assert told.text.count(told.hero) >= 2, told.text
        assert told.friend in told.text
        if told.noun is not None:
            assert told.text.count(told.noun) >= 2, told.text
        if told.animal is not None:
            assert told.animal in told.text, told.text
        if told.place is not None:
            assert told.place.noun in told.text, told.text
        assert told.lesson in told.text, told.text


def test_hero_can_be_chosen() -> None:
    told = story(random.Random(1), hero="Robin")
    assert told.hero == "Robin"
    assert "Robin" in told.text


def test_request_names_only_what_the_story_has(stories: list[Story]) -> None:
    rng = random.Random(6)
    topics = {plan.topic for plan in PLANS}
    for told in stories:
        asked, announced = request(rng, told)
        subject = announced.removesuffix(".").split(" a story ", 1)[1]
        assert subject in asked
        named = {name for name in NAMES if re.search(rf"\b{name}\b", asked)}
        assert named <= {told.hero, told.friend}
        about = re.search(r"about an? (.+?)(?:,|\.|\?| and )", asked)
        if about is not None and not any(topic in asked for topic in topics):
            assert about[1] in told.text, (asked, told.text)


def test_answers_use_only_words_of_the_story(stories: list[Story]) -> None:
    for told in stories:
        for question, answer in told.answers:
            known = _words(told.text) | _words(question) | _ANSWER_WORDS
            assert _words(answer) <= known, (question, answer, told.text)


def test_answers_are_right() -> None:
    rng = random.Random(8)
    for _ in range(200):
        told = story(rng, plan=next(plan for plan in PLANS if plan.topic == "losing something"))
        answers = dict(told.answers)
        he = NAMES[told.hero].subject
        assert told.place is not None
        assert answers[f"Why was {told.hero} sad?"] == (
            f"{told.hero} was sad because {he} lost the {told.noun}."
        )
        assert answers[f"Where did {told.hero} go?"] == (
            f"{told.hero} went to the {told.place.noun}."
        )
        assert answers[f"Who found the {told.noun}?"] == f"{told.friend} found the {told.noun}."
        assert answers[f"What did {told.hero} learn?"] == (
            f"{told.hero} learned that {told.lesson}."
        )
        spot = answers[f"Where was the {told.noun}?"].removeprefix(f"The {told.noun} was ")
        assert spot.rstrip(".") in told.text


def test_conversations_alternate_and_hold_their_stories(conversations: list[Document]) -> None:
    for document in conversations:
        roles = [role for role, _ in document.turns]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        told = [text for role, text in document.turns if role == "assistant"]
        assert all(any(text.endswith(one.text) for text in told) for one in document.stories)


def test_another_story_has_the_hero_asked_for(conversations: list[Document]) -> None:
    seen = 0
    for document in conversations:
        for (_, question), (_, answer) in itertools.pairwise(document.turns):
            match = re.search(r"(?:another|Another|me one).* about (\w+)\.$", question)
            if match:
                seen += 1
                assert match[1] in answer
    assert seen > 10
