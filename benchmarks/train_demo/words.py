"""Words of the story grammar, and the shape of one kind of story."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pronouns:
    """The pronouns that a character goes by, and the verb form that agrees with them."""

    subject: str
    object: str
    possessive: str
    reflexive: str
    was: str
    child: str
    sibling: str


SHE = Pronouns("she", "her", "her", "herself", "was", "girl", "sister")
HE = Pronouns("he", "him", "his", "himself", "was", "boy", "brother")
THEY = Pronouns("they", "them", "their", "themself", "were", "child", "cousin")


@dataclass(frozen=True)
class Place:
    """A place, the preposition that goes with it, and three spots to look in."""

    noun: str
    preposition: str
    spots: tuple[str, str, str]


# Lists of words read better in filled lines than with one word a line.
# fmt: off
_SHE_NAMES = (
    "Mia", "Lily", "Anna", "Zoe", "Ella", "Ruby", "Nora", "Lucy", "Emma", "Clara", "Rosa",
    "Ivy", "Hana", "Maya", "Grace", "Olive", "Alice", "Daisy", "Leila", "Tess", "June", "Sara",
)
_HE_NAMES = (
    "Tom", "Ben", "Max", "Leo", "Sam", "Jack", "Finn", "Noah", "Oscar", "Hugo", "Omar", "Theo",
    "Luke", "Peter", "Adam", "Felix", "Ravi", "Henry", "Milo", "Otto", "Jonas", "Kofi",
)
_THEY_NAMES = ("Robin", "Sky", "River", "Ash", "Kit", "Wren")

NAMES: dict[str, Pronouns] = {
    **dict.fromkeys(_SHE_NAMES, SHE),
    **dict.fromkeys(_HE_NAMES, HE),
    **dict.fromkeys(_THEY_NAMES, THEY),
}

TOYS = (
    "kite", "ball", "doll", "teddy bear", "toy train", "puzzle", "drum", "whistle", "scarf",
    "hat", "book", "robot", "toy boat", "toy car", "yo-yo", "balloon", "umbrella", "backpack",
    "blanket", "flute", "marble", "puppet", "crayon box", "paper airplane", "lantern", "ring",
    "magnet", "toy rocket", "wagon", "mitten",
)
FRAGILE = (
    "vase", "cup", "lamp", "plate", "mirror", "jar", "teapot", "clock", "bowl",
    "picture frame", "flower pot", "music box", "egg timer", "glass bird",
)
TREASURES = (
    "key", "shell", "coin", "map", "stone", "feather", "bottle", "box", "bell", "button",
    "necklace", "compass", "acorn", "crystal", "letter", "spoon", "egg", "crown", "telescope",
)
GIFTS = (
    "card", "bracelet", "cake", "painting", "song book", "basket", "pillow", "candle",
    "birdhouse", "necklace", "sweater", "jump rope", "flower crown", "wooden horse", "apple pie",
)
SHARED = (
    "bicycle", "scooter", "sled", "ball", "kite", "wagon", "drum", "puzzle", "book",
    "toy train", "skateboard", "paint set", "magnet", "jump rope", "flute", "toy boat",
)
SEEDS = (
    "sunflower", "pumpkin", "tomato", "apple tree", "bean", "carrot", "strawberry", "rose",
    "melon", "tulip", "onion", "pepper",
)

COLORS = (
    "red", "blue", "green", "yellow", "orange", "purple", "pink", "white", "brown", "silver",
)
QUALITIES = ("little", "big", "new", "old", "pretty", "small", "lovely", "special", "plain")
TREASURE_LOOKS = (
    "shiny", "tiny", "golden", "silver", "strange", "round", "old", "odd", "smooth", "blue",
    "dusty", "beautiful", "unusual",
)

TRAITS = (
    "kind", "curious", "clever", "cheerful", "quiet", "brave", "shy", "playful", "gentle",
    "funny", "honest", "busy", "thoughtful", "eager", "friendly", "young",
)

PLACES = (
    Place("forest", "in", ("behind an old oak", "under a fern", "next to a fallen log")),
    Place("park", "in", ("under the bench", "behind the fountain", "next to the slide")),
    Place("beach", "at", ("behind a sand castle", "under a towel", "next to a big rock")),
    Place("river", "by", ("under the bridge", "behind the reeds", "next to an old boat")),
    Place("meadow", "in", ("behind the fence", "under the daisies", "next to a stream")),
    Place("garden", "in", ("under the rose bush", "behind the shed", "next to the gate")),
    Place("hill", "on", ("behind a tall pine", "under a flat stone", "next to the path")),
    Place("farm", "on", ("behind the barn", "under the hay", "next to the tractor")),
    Place("lake", "at", ("under the dock", "behind the tall grass", "next to a canoe")),
    Place("market", "at", ("under a table", "behind the apple cart", "next to a big basket")),
    Place("library", "in", ("under a chair", "behind the long shelf", "next to the window")),
    Place("school", "at", ("under a desk", "behind the door", "next to the board")),
    Place("playground", "on", ("under the swings", "behind the seesaw", "next to the sandbox")),
    Place("village", "in", ("behind the bakery", "under the bell tower", "next to the well")),
    Place("orchard", "in", ("under an apple tree", "behind a ladder", "next to a wheelbarrow")),
    Place("mountain", "on", ("behind a boulder", "under a ledge", "next to a waterfall")),
    Place("harbor", "at", ("behind a stack of crates", "under a net", "next to the lighthouse")),
    Place("valley", "in", ("under a willow", "behind the windmill", "next to a pond")),
    Place("castle", "in", ("behind the throne", "under the stairs", "next to the tower")),
    Place("train station", "at", ("under a seat", "behind the clock", "next to the ticket office")),
    Place("zoo", "at", ("behind the ice cream stand", "under a sign", "next to the monkey house")),
    Place("museum", "in", ("under the whale bones", "behind a statue", "next to the stairs")),
    Place("island", "on", ("under a palm tree", "behind the dunes", "next to a tide pool")),
    Place("desert", "in", ("behind a cactus", "under a red rock", "next to a dry well")),
)

# Places where an animal can live, a storm can break and a seed can grow.
WILD = tuple(
    place
    for place in PLACES
    if place.noun
    in {
        "forest", "river", "meadow", "garden", "hill", "farm", "lake", "valley", "orchard",
        "mountain", "island",
    }
)

# Each animal with the home that it lives in.
ANIMALS: dict[str, str] = {
    "fox": "den", "rabbit": "burrow", "mouse": "hole", "squirrel": "hollow tree",
    "hedgehog": "pile of leaves", "duck": "nest", "owl": "tall tree", "frog": "pond",
    "bear": "cave", "deer": "quiet grove", "beaver": "lodge", "otter": "den", "badger": "burrow",
    "turtle": "mossy bank", "goat": "shed", "lamb": "barn", "kitten": "basket",
    "puppy": "wooden box", "sparrow": "nest", "wolf": "cave", "ant": "anthill",
    "elephant": "shady grove", "raccoon": "hollow log", "pony": "stable",
}

DAYS = (
    "sunny morning", "rainy afternoon", "windy day", "cold morning", "warm evening",
    "foggy morning", "snowy day", "bright afternoon", "cloudy day", "quiet evening",
    "hot afternoon", "spring morning", "summer day", "autumn afternoon", "winter day",
    "icy morning",
)
# fmt: on

GROWN_UPS = ("mother", "father", "grandmother", "grandfather", "aunt", "uncle")

Beat = tuple[str, ...]


@dataclass(frozen=True)
class StoryPlan:
    """One kind of story: its beats, its lessons and the questions that it answers.

    Each beat is a tuple of alternatives. In their texts ``[x|y]`` chooses one, ``{slot}`` is filled
    in from the story's characters and things, and ``a~`` becomes "a" or "an".
    """

    topic: str
    beats: tuple[Beat, ...]
    lessons: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]
    nouns: tuple[str, ...] = TOYS
    looks: tuple[str, ...] = COLORS + QUALITIES
    places: tuple[Place, ...] = PLACES
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
