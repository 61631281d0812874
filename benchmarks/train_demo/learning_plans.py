"""Story plans about learning: being brave, practicing and being patient."""

from __future__ import annotations

from benchmarks.train_demo import words
from benchmarks.train_demo.words import HELPED, StoryPlan

FEAR = StoryPlan(
    topic="being brave",
    names_noun=False,
    names_place=False,
    animal_hero=True,
    cases=(
        {"fear": "the dark", "first": "looked at the stars", "end": "slept without a light"},
        {"fear": "thunder", "first": "counted the seconds", "end": "watched the storm"},
        {"fear": "deep water", "first": "put one foot in", "end": "swam across the pond"},
        {"fear": "high places", "first": "climbed one step", "end": "stood on the tower"},
        {"fear": "big dogs", "first": "held out one hand", "end": "played with a big dog"},
        {"fear": "the old bridge", "first": "took one small step", "end": "ran over the bridge"},
        {"fear": "spiders", "first": "watched a spider spin", "end": "carried a spider outside"},
        {"fear": "singing in front of others", "first": "hummed a tune", "end": "sang a song"},
        {"fear": "caves", "first": "lit a lantern", "end": "walked through the cave"},
        {"fear": "strangers", "first": "waved from the door", "end": "made a new friend"},
    ),
    beats=(
        (
            "There was one thing that {hero} did not like: {he} {was} afraid of {fear}.",
            "{hero} was afraid of {fear}, and {he} did not tell anyone.",
        ),
        (
            "One {day}, [the others|some neighbors|some friends] laughed at {him}, and {hero} "
            "[ran away|hid|went home early].",
            "Because of that, {he} often [stayed at home|hid under a blanket] while others played.",
        ),
        (
            '{pal_intro} sat down next to {him}. "[Everyone is afraid of something|I was afraid '
            'once, too|It is all right to be afraid]," {phe} said.',
        ),
        (
            '"What if [something bad happens|I cannot do it]?" asked {hero}. '
            '"[I will stay with you|We will go slowly|Hold my hand]," [said|answered] {pal}.',
        ),
        (
            "So {hero} {first}, while {pal} [stayed close|held {his} hand|watched].",
            "{hero} took a deep breath and {first}. [Nothing bad happened|It was not so bad].",
        ),
        (
            "They tried again [the next day|every day for a week], and each time it was "
            "[easier|a little less scary].",
            "The second time it was easier, and the third time {hero} even [smiled|laughed].",
        ),
        (
            "[Soon|At last|In the end] {hero} {end} all by {himself}. "
            '"[Look at you|You did it|Well done]!" [cried|shouted] {pal}.',
        ),
        ("{hero} learned that {lesson}.", "{hero} felt [proud|tall|strong]. {He} knew {lesson}."),
    ),
    lessons=(
        "being brave means trying even when you are afraid",
        "fear gets smaller when you face it",
        "it is easier to be brave with a friend",
        "small steps can take you far",
    ),
    questions=(
        ("What was {hero} afraid of?", "{hero} was afraid of {fear}."),
        ("What did {hero} do in the end?", "In the end, {hero} {end}."),
        HELPED,
    ),
)

PRACTICE = StoryPlan(
    topic="not giving up",
    places=words.WILD,
    names_noun=False,
    cases=(
        {"skill": "ride a bicycle", "fail": "fell into the grass", "best": "rode in a big circle"},
        {"skill": "swim", "fail": "swallowed some water", "best": "swam ten strokes"},
        {"skill": "whistle", "fail": "made no sound", "best": "whistled a merry tune"},
        {"skill": "juggle", "fail": "dropped every ball", "best": "juggled three balls"},
        {"skill": "skate", "fail": "slipped and sat down hard", "best": "skated like the wind"},
        {"skill": "jump rope", "fail": "tripped over the rope", "best": "jumped twenty times"},
        {"skill": "fly a kite", "fail": "got the string in a knot", "best": "made the kite soar"},
        {"skill": "draw a horse", "fail": "drew something like a cow", "best": "drew a fine horse"},
        {"skill": "climb a rope", "fail": "slid down again", "best": "climbed to the top"},
        {"skill": "play the flute", "fail": "made a terrible squeak", "best": "played a song"},
        {"skill": "do a cartwheel", "fail": "landed on {his} back", "best": "did two cartwheels"},
        {"skill": "row a boat", "fail": "went around in circles", "best": "rowed straight ahead"},
    ),
    beats=(
        (
            "{hero} wanted to learn to {skill}[, because {pal} could do it| more than anything].",
            'One {day}, {hero} said, "I want to learn to {skill}!"',
        ),
        (
            "{He} went {to_place} with {pal_intro} and tried, but {he} {fail}.",
            "So {he} and {pal_intro} met {in_place}. The first time, {hero} {fail}.",
        ),
        (
            '"[I will never learn it|It is too hard|I give up]!" [cried|said|shouted] {hero}, '
            "and {he} felt [angry|sad|like crying].",
        ),
        (
            '"[Nobody can do it at once|I needed a whole month|Try it one more time]," '
            "[said|answered] {pal}[ kindly| with a smile|].",
        ),
        (
            "{hero} [wiped {his} face|stood up|nodded] and tried again. {He} {fail} once more, but "
            "this time {he} laughed.",
            "So {hero} practiced [every morning|after school|day after day], even when it rained.",
        ),
        (
            "Then, one {day2}, it happened: {hero} {best}!",
            "[A week|Many days|Two weeks] later, {hero} {best}, and {pal} [clapped|cheered].",
        ),
        (
            '"[I can do it!|Look at me!|Did you see that?]" [shouted|cried] {hero}. '
            '"[I knew it|I am proud of you]," said {pal}.',
        ),
        ("{hero} learned that {lesson}.", "From that day on, {hero} knew that {lesson}."),
    ),
    lessons=(
        "practice makes hard things easy",
        "you should never give up",
        "it is fine to fail many times",
        "good things take time",
    ),
    questions=(
        ("What did {hero} want to learn?", "{hero} wanted to learn to {skill}."),
        ("What happened the first time?", "The first time, {hero} {fail}."),
        ("Did {hero} give up?", "No, {hero} did not give up. In the end {he} {best}."),
        ("Where did they practice?", "They practiced {in_place}."),
    ),
)

GARDEN = StoryPlan(
    topic="being patient",
    nouns=words.SEEDS,
    looks=("little", "tiny", "small", "round", "brown"),
    names_place=False,
    cases=tuple(
        {"day": sown, "day2": grown}
        for sown in ("spring morning", "windy day", "rainy afternoon", "cold morning")
        for grown in ("sunny morning", "warm evening", "bright afternoon", "summer day")
    ),
    beats=(
        (
            "One {day}, {hero}'s {grown} gave {him} a~ {noun} seed. "
            "{hero} [put it in a pot|planted it by the gate|pushed it into the soft earth].",
            "{hero} found a~ {noun} seed in {his} pocket and planted it [in the garden|in a pot].",
        ),
        (
            "{He} watered it every [day|morning|evening] and waited, but nothing happened.",
            "Every morning {he} ran out to look, but there was only [dirt|brown earth].",
        ),
        (
            '"[Why does it not grow|Is it asleep|What is wrong with it]?" asked {hero}. {He} {was} '
            "[sad|impatient|disappointed].",
        ),
        (
            '"[Seeds need time|You must be patient|Give it sun and water]," said {pal_intro}. '
            '"[Just wait|Something is growing in the dark|Do not dig it up]."',
        ),
        (
            "So {hero} waited. It rained, and then the sun [shone|came out] for many days.",
            "{hero} [sang to the seed|told the seed stories] while {he} waited, and {pal} helped.",
        ),
        (
            "Then, one {day2}, there was a tiny green leaf! {hero} [jumped|danced] for joy.",
            '"{pal}, come and see!" {hero} called one {day2}. A green leaf had come up.',
        ),
        (
            "The {noun} grew [taller and taller|day by day|bigger every week], and by the end of "
            "summer it was [as tall as {hero}|the finest on the street|strong and beautiful].",
        ),
        ("{hero} learned that {lesson}.",),
    ),
    lessons=(
        "good things take time",
        "it pays to be patient",
        "small seeds can become great things",
        "care makes things grow",
    ),
    questions=(
        ("What did {hero} plant?", "{hero} planted a~ {noun} seed."),
        ("Why was {hero} sad?", "{hero} was sad because the {noun} seed did not grow at once."),
        ("What did {pal} say?", "{pal} told {hero} to wait."),
    ),
)

LEARNING_PLANS = (FEAR, PRACTICE, GARDEN)
