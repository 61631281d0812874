"""Story plans about exploring and building: treasures, storms, noises, constructions."""

from __future__ import annotations

from benchmarks.train_demo import words
from benchmarks.train_demo.words import HELPED, THANKS, StoryPlan

TREASURE = StoryPlan(
    topic="finding something",
    nouns=words.TREASURES,
    looks=words.TREASURE_LOOKS,
    animal_hero=True,
    beats=(
        (
            "One {day}, {hero} and {pal_intro} [were exploring|were playing|took a walk] "
            "{in_place}.",
        ),
        (
            "[Suddenly|Then] {hero} saw something {spot1}. It was a~ {obj}!",
            '"[Look!|Come here!|What is that?]" called {hero}. {spot1} lay a~ {obj}.',
        ),
        (
            '"[We are rich|Let us keep it|How pretty it is]!" said {pal}. '
            '"But [who lost it|where does it come from|whose is it]?" asked {hero}.',
        ),
        (
            "They [asked everyone|went from door to door|followed some footprints] until they met "
            "an old {owner} who was [sad|looking for something] {spot2}.",
        ),
        (
            '"Have you seen my {noun}?" asked the {owner}. "[My mother gave it to me|I have had it '
            'all my life|I cannot sleep without it]."',
        ),
        (
            "{hero} [liked the {noun} very much|wanted to keep the {noun}], but {he} gave it back "
            "[at once|with a smile].",
        ),
        (
            "The {owner} was so happy that {hero} and {pal} got [warm bread with honey|hot soup|"
            "a big bag of nuts|two sweet pears|a~ {treasure}] as a reward.",
            'The {owner} [laughed|cried] with joy. "[You have good hearts|Bless you both]!"',
        ),
        ("{hero} learned that {lesson}.", "On the way home, {hero} thought that {lesson}."),
    ),
    cases=tuple(
        {"owner": owner}
        for owner in ("sailor", "woman", "farmer", "baker", "king", "teacher", "man", "painter")
    ),
    lessons=(
        "it is right to give back what you find",
        "being honest brings joy",
        "a happy face is the best treasure",
    ),
    questions=(
        ("What did {hero} find?", "{hero} found a~ {obj}."),
        ("Where was the {noun}?", "The {noun} was {spot1}."),
        ("Who had lost the {noun}?", "An old {owner} had lost the {noun}."),
        ("Where were they?", "They were {in_place}."),
    ),
)

STORM = StoryPlan(
    topic="a storm",
    places=words.WILD,
    # The day has to be fine at first, and warm enough for flowers.
    cases=tuple(
        {"day": day}
        for day in (
            "sunny morning",
            "hot afternoon",
            "spring morning",
            "summer day",
            "warm evening",
        )
    ),
    animal_hero=True,
    beats=(
        (
            "One {day}, {hero} went {to_place} with {pal_intro}. They took a~ {obj} along.",
            "{hero} and {pal_intro} were {in_place} with a~ {obj} one {day}.",
        ),
        (
            "[At first|For an hour] the sky was [blue|clear], and they [ran|sang|told jokes].",
            "They [picked flowers|climbed trees|chased butterflies|watched the birds].",
        ),
        (
            "[Then|Suddenly] [dark|black|gray] clouds came, and it began to [rain|hail|pour].",
            "[Then|Suddenly] the wind began to blow, and it grew dark.",
        ),
        ('"We must find shelter!" [cried|shouted] {pal}. {hero} was [cold|frightened|wet].',),
        (
            "{hero} looked around and saw a dry spot {spot1}. They [crawled|ran] there with the "
            "{noun}.",
        ),
        (
            "To pass the time, they [told stories|sang songs|played] and kept the {noun} dry, "
            "while the thunder [rolled|roared].",
            "They sat close together and [shared an apple|shared some bread|told stories] "
            "until they [were warm|forgot their fear].",
        ),
        (
            "When the storm was over, a [huge|bright|wonderful] rainbow stood over the {place}.",
            "At last the sun came out, and [every leaf shone|the birds began to sing].",
        ),
        (
            '"[I am glad that you were with me|That was an adventure]," said {hero}. '
            "{He} had learned that {lesson}.",
            "They carried the {noun} home. {hero} learned that {lesson}.",
        ),
    ),
    lessons=(
        "every storm passes",
        "a friend makes hard times easier",
        "it helps to stay calm",
    ),
    questions=(
        ("Where did they hide?", "They hid {spot1}."),
        ("What did they take along?", "They took a~ {obj} along."),
        ("Where did they go?", "They went {to_place}."),
        ("Who was with {hero}?", "{pal} was with {hero}."),
    ),
)

NOISE = StoryPlan(
    topic="a strange noise",
    names_animal=True,
    names_noun=False,
    places=words.WILD,
    beats=(
        (
            "One {evening}, {hero} and {pal_intro} were {in_place} when {hero} heard a "
            "strange noise.",
            "{hero} and {pal_intro} were camping {in_place}. At night there was a strange noise.",
        ),
        (
            '"[What was that|Did you hear that|Who is there]?" whispered {hero}. It went '
            '"[tap, tap, tap|hoo, hoo|crack, crack|rustle, rustle]".',
        ),
        (
            "{hero} thought of [monsters|ghosts|giants|dragons], and {his} knees shook.",
            "{pal} wanted to [run home|hide], but {hero} wanted to know what it was.",
        ),
        (
            "{hero} took a lamp, and {he} and {pal} [crept|walked slowly|tiptoed] toward the "
            "sound.",
            'Then {hero} said to {pal}, "Let us [look|find out|go and see]," and they went closer.',
        ),
        (
            "There, {spot1}, sat a~ {small} {animal}! It was [eating a nut|trying to get home|"
            "playing with a can|dancing in the leaves].",
        ),
        (
            '"It is only a~ {animal}!" [laughed|cried] {pal}, and both of them laughed '
            "and laughed.",
            "{hero} [giggled|laughed]. A~ {small} {animal} had made all that noise!",
        ),
        (
            "They [gave the {animal} a bit of bread|watched the {animal} for a while] "
            "until it went back to its {animal_home}.",
            "The {animal} [blinked|looked up] and then hurried off to its {animal_home}.",
        ),
        ("{hero} learned that {lesson}.",),
    ),
    lessons=(
        "things are often less scary than they seem",
        "it is good to look before you run",
        "asking questions is better than being afraid",
    ),
    questions=(
        ("What made the noise?", "A~ {small} {animal} made the noise."),
        ("Where was the {animal}?", "The {animal} was {spot1}."),
        ("Where was {hero}?", "{hero} was {in_place}."),
        ("Where did the {animal} live?", "The {animal} lived in its {animal_home}."),
    ),
)

MAKING = StoryPlan(
    topic="building something",
    places=words.WILD,
    animal_hero=True,
    cases=(
        {"noun": "kite", "part": "string", "giver": "tailor", "use": "flew high above"},
        {"noun": "raft", "part": "rope", "giver": "sailor", "use": "floated past"},
        {"noun": "tree house", "part": "ladder", "giver": "carpenter", "use": "looked out over"},
        {"noun": "boat", "part": "sail", "giver": "fisherman", "use": "sailed along"},
        {"noun": "cart", "part": "wheel", "giver": "farmer", "use": "rolled down to"},
        {"noun": "flagpole", "part": "flag", "giver": "weaver", "use": "stood tall above"},
        {"noun": "scarecrow", "part": "hat", "giver": "gardener", "use": "watched over"},
        {"noun": "windmill", "part": "nail", "giver": "blacksmith", "use": "turned above"},
        {"noun": "swing", "part": "board", "giver": "miller", "use": "swung over"},
    ),
    beats=(
        (
            "One {day}, {hero} had an idea. {He} wanted to build a~ {obj} for everyone {in_place}.",
            '"I will build a~ {obj}!" said {hero} one {day}. "It will be the best {in_place}."',
        ),
        (
            "{pal_intro} came to help, and they worked [all morning|hard|side by side].",
            '"May I help?" asked {pal_intro}. So they [worked together|began at once].',
        ),
        (
            "But [there was a problem|something was missing]: the {noun} had no {part}.",
            "When it was almost done, they saw that they had no {part}.",
        ),
        (
            "{hero} was [disappointed|sad] and [sat down|kicked a stone]. "
            '"[Now it is all for nothing|We will never finish it]," {he} said.',
        ),
        (
            '"[Let us ask someone|I know who can help us]," said {pal}. So they went to the '
            "{giver} and asked politely.",
            "Then {pal} remembered the old {giver}, and they [ran|went] there to ask for help.",
        ),
        (
            'The {giver} [smiled|laughed] and said, "[I have just the thing|Take this]." '
            "It was [the perfect|just the right] {part}.",
        ),
        (
            "[Before sunset|Soon|The same day], the {noun} was ready. "
            "It {use} the {place}, and [everyone cheered|everybody clapped|all were amazed].",
        ),
        THANKS,
        ("{hero} learned that {lesson}.",),
    ),
    lessons=(
        "it is good to ask for help",
        "great things are made together",
        "a problem is easier to solve with others",
    ),
    questions=(
        ("What did {hero} build?", "{hero} built a~ {obj}."),
        ("What was missing?", "The {noun} had no {part}."),
        ("Who gave them the {part}?", "The {giver} gave them the {part}."),
        ("Why was {hero} sad?", "{hero} was sad because the {noun} had no {part}."),
        HELPED,
    ),
)

ADVENTURE_PLANS = (TREASURE, STORM, NOISE, MAKING)
