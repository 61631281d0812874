"""Story plans about friends and family: losing, sharing, honesty, rescue, gifts."""

from __future__ import annotations

from benchmarks.train_demo import words
from benchmarks.train_demo.words import HELPED, THANKS, WENT, StoryPlan

LOST = StoryPlan(
    topic="losing something",
    animal_hero=True,
    beats=(
        (
            "{hero} had a~ {obj} that {he} [loved very much|liked best of all|took everywhere].",
            "{His} {grown} had given {him} a~ {obj}, and {he} [loved it dearly|{was} proud of it].",
        ),
        (
            "One {day}, {hero} [took|carried|brought] the {noun} {to_place} and "
            "[played until noon|ran about for hours|had a lot of fun].",
            "One {day}, {hero} [walked|hurried|skipped] {to_place} with the {noun}.",
        ),
        (
            "[When it was time to go home|After a while|A little later], {he} [saw|noticed] that "
            "the {noun} was gone. {hero} [was very sad|felt so sad that {he} began to cry].",
        ),
        (
            '"[What is wrong|Why are you crying|What happened]?" asked {pal_intro}. '
            '"I lost my {noun}," [said|answered|whispered] {hero}. '
            '"[Do not worry|Do not cry|Cheer up], we will look for it together," said {pal}.',
        ),
        (
            "They [looked|searched] {spot1}, but the {noun} was not there.",
            "First they looked {spot1}, and then {spot2}, but they found nothing.",
            "They [looked|searched] {spot1} and found only [a few leaves|an old shoe|a snail].",
        ),
        (
            "[At last|Finally], {pal} looked {spot3} and [shouted|called], "
            '"[Here it is|I found it|Come and see]!" The {noun} was [dusty|muddy|wet], '
            "but it was not broken.",
            "[At last|Finally], {pal} [spotted|saw] something {look} {spot3}. It was the {noun}!",
        ),
        THANKS,
        (
            "{hero} learned that {lesson}.",
            "{hero} held the {noun} tight on the way home. {He} had learned that {lesson}.",
        ),
    ),
    lessons=(
        "a good friend helps when you are sad",
        "two friends can find what one cannot",
        "it is wise to take care of your things",
        "crying is fine, but looking is better",
    ),
    questions=(
        ("Why was {hero} sad?", "{hero} was sad because {he} lost the {noun}."),
        ("What did {hero} lose?", "{hero} lost a~ {obj}."),
        ("Who found the {noun}?", "{pal} found the {noun}."),
        ("Where was the {noun}?", "The {noun} was {spot3}."),
        WENT,
        HELPED,
    ),
)

SHARE = StoryPlan(
    topic="sharing",
    nouns=words.SHARED,
    beats=(
        (
            "One {day}, {hero} and {pal_intro} [went|walked|ran] {to_place}. "
            "There they [saw|found|were given] a~ {obj}.",
        ),
        (
            '"[I saw it first|It is my turn|I want it]!" [cried|shouted|said] {hero}. '
            '"No, it is mine!" [cried|shouted|said] {pal}.',
            "{hero} wanted the {noun}, but {pal} wanted it too.",
        ),
        (
            "They [pulled and pushed|argued|shouted] until both of them were [angry|upset].",
            "{hero} grabbed the {noun} and ran away. {pal} sat down {spot1} and cried.",
        ),
        (
            "Then {hero} [saw the tears in {pal}'s eyes|thought about it] and felt [sorry|bad].",
            "After a while, {hero} was alone with the {noun}, and it was not any fun.",
        ),
        ('"I am sorry," said {hero}. "[Let us share it|We can take turns|You can go first]."',),
        (
            '{pal} smiled. "[That is a good idea|That is fair|I am sorry too]," {phe} said.',
            '{pal} wiped {phis} eyes and [nodded|laughed]. "Yes, please," {phe} said.',
        ),
        (
            "They shared the {noun} [all afternoon|until the sun went down|and laughed a lot].",
            "So they took turns with the {noun}, and [nobody was angry|both of them were happy].",
        ),
        ("{hero} learned that {lesson}.", "On the way home, {hero} knew that {lesson}."),
    ),
    lessons=(
        "sharing makes everything more fun",
        "a friend is worth more than a thing",
        "taking turns is fair",
        "it is good to say sorry",
    ),
    questions=(
        ("Why did {hero} and {pal} argue?", "They argued because they both wanted the {noun}."),
        ("What did they share?", "They shared a~ {obj}."),
        ("Who said sorry?", "{hero} said sorry to {pal}."),
        ("Where did they go?", "They went {to_place}."),
    ),
)

BROKEN = StoryPlan(
    topic="telling the truth",
    nouns=words.FRAGILE,
    names_place=False,
    beats=(
        (
            "{His} {grown} had a~ {obj} that stood [on a shelf|on the table|by the door].",
            "In the house there was a~ {obj} that {his} {grown} loved.",
        ),
        (
            "One {day}, {hero} was [playing with a ball|dancing|chasing {pal}|jumping] indoors, "
            "although it was not allowed.",
        ),
        (
            "[Crash|Bang|Oh no]! {He} [hit|bumped into] the {noun}, and it [broke|cracked].",
            "Suddenly {he} slipped, the {noun} fell over, and it [broke in two|cracked].",
        ),
        (
            "{hero} was [afraid|scared|worried] and hid the pieces [under the bed|in a drawer].",
            "{hero}'s heart beat fast. {He} wanted to run away and hide.",
        ),
        (
            '"[You should tell the truth|It is better to be honest]," said {pal_intro}. '
            '"I will go with you."',
            '{pal_intro} saw what had happened. "Let us tell the truth," {phe} said.',
        ),
        (
            "So {hero} [took a deep breath|was brave] and went to {his} {grown}. "
            '"I broke the {noun}," {he} said. "I am [so|very] sorry."',
        ),
        (
            "{His} {grown} was quiet for a moment and then [smiled|hugged {him}]. "
            '"Thank you for telling me," {his} {grown} said. "We can [fix it|glue it] together."',
        ),
        (
            "They [fixed|glued|mended] the {noun} [that evening|with care|after dinner], "
            "and {hero} felt [much better|as light as a feather].",
        ),
        ("{hero} learned that {lesson}.",),
    ),
    lessons=(
        "telling the truth is the best way",
        "the truth makes your heart light",
        "everyone makes mistakes",
        "being honest takes courage",
    ),
    questions=(
        ("What did {hero} break?", "{hero} broke a~ {obj}."),
        ("Why was {hero} worried?", "{hero} was worried because {he} broke the {noun}."),
        ("Whose {noun} was it?", "The {noun} belonged to {hero}'s {grown}."),
        ("Who told {hero} to be honest?", "{pal} told {hero} to be honest."),
    ),
)

RESCUE = StoryPlan(
    topic="helping an animal",
    names_animal=True,
    names_noun=False,
    places=words.WILD,
    cases=(
        {"trouble": "stuck in a net", "fix": "cut the net", "tool": "a pair of scissors"},
        {"trouble": "caught in the thorns", "fix": "bent the thorns away", "tool": "a stick"},
        {"trouble": "trapped under a branch", "fix": "lifted the branch", "tool": "a rope"},
        {"trouble": "stuck in the mud", "fix": "laid a path over the mud", "tool": "a board"},
        {"trouble": "lost and very hungry", "fix": "gave it some food", "tool": "a lunch box"},
        {"trouble": "shaking with cold", "fix": "wrapped it up warmly", "tool": "a blanket"},
    ),
    beats=(
        (
            "One {day}, {hero} went for a walk {in_place}.",
            "One {day}, {hero} [walked|went] {to_place}, because the air was [fresh|sweet].",
        ),
        (
            "{spot1}, {he} heard a [soft|small|sad] cry. It was a~ {small} {animal}, and it "
            "was {trouble}.",
            "There {he} saw a~ {small} {animal} {spot1}. The poor {animal} was {trouble}.",
        ),
        (
            '"[Do not be afraid|I will help you|Stay calm], little {animal}," [said|whispered] '
            "{hero}.",
            "The {animal} looked at {hero} with [big|sad|frightened] eyes.",
        ),
        (
            "{hero} could not do it alone, so {he} called {pal_intro}. {pal} came running with "
            "{tool}.",
            "{hero} ran to fetch {pal_intro}, who brought {tool}.",
        ),
        (
            "Together they {fix}, [slowly and gently|very carefully|bit by bit], "
            "and [soon|at last] the {animal} was [safe|well again].",
        ),
        (
            "The {animal} [jumped for joy|rubbed against {hero}'s hand|made a happy sound] before "
            "it [ran off|went home] to its {animal_home}.",
        ),
        (
            "The next day, the {animal} [came back with a~ {treasure}|was waiting {spot2}], "
            "as if to say thank you.",
            "After that, the {animal} [often came to play|was never afraid of {him}].",
        ),
        ("{hero} learned that {lesson}.", '"We did it," said {pal}. {hero} knew that {lesson}.'),
    ),
    lessons=(
        "even a small kindness matters",
        "kindness comes back to you",
        "helping others feels good",
        "a gentle hand wins trust",
    ),
    questions=(
        ("What did {hero} find?", "{hero} found a~ {small} {animal} that was {trouble}."),
        ("What happened to the {animal}?", "The {animal} was {trouble}, but {hero} helped it."),
        ("What did {pal} bring?", "{pal} brought {tool}."),
        WENT,
        HELPED,
    ),
)

GIFT = StoryPlan(
    topic="giving a present",
    nouns=words.GIFTS,
    looks=("lovely", "pretty", "little", "beautiful", "special", "simple", "red", "blue", "yellow"),
    names_place=False,
    animal_hero=True,
    beats=(
        (
            "It was {pal}'s birthday, and {hero} [wanted to give|hoped to find] {phim} a present.",
            "{hero} heard that {pal_intro} would have a birthday the next day.",
        ),
        (
            "But {hero} had no money[| at all], so {he} {was} [worried|sad].",
            "{hero} looked everywhere, but nothing seemed good enough. {He} {was} worried.",
        ),
        (
            '"[A gift from the heart is the best gift|You can make something yourself]," '
            "{his} {grown} said.",
            '"What should I do?" {he} asked {his} {grown}. "[Make|Try to make] something '
            'yourself," was the answer.',
        ),
        (
            "So {hero} [sat down|got to work|stayed up late] and made a~ {obj}.",
            "{hero} worked [all day|with care|for many hours] until {he} had made a~ {obj}.",
        ),
        (
            "The {noun} was not perfect, but {hero} had made it with love.",
            "One side of the {noun} was a little crooked, and {hero} felt shy about it.",
        ),
        (
            "At the party, {pal} opened the present and [smiled|laughed with joy|gasped]. "
            '"[This is the best present of all|I love it|It is beautiful]!" {phe} [said|cried].',
        ),
        (
            "{pal} kept the {noun} [next to {phis} bed|in a safe place] for many years.",
            "Then everyone ate cake, and {hero} and {pal} [danced|sang|played] until dark.",
        ),
        ("{hero} learned that {lesson}.", "That day {hero} understood that {lesson}."),
    ),
    lessons=(
        "a gift made with love is the best gift",
        "giving is a joy",
        "a present does not have to cost money",
    ),
    questions=(
        ("What did {hero} make?", "{hero} made a~ {obj} for {pal}."),
        ("Why was {hero} worried?", "{hero} was worried because {he} had no present for {pal}."),
        ("Whose birthday was it?", "It was {pal}'s birthday."),
        ("Did {pal} like the {noun}?", "Yes, {pal} loved the {noun}."),
    ),
)

FRIENDSHIP_PLANS = (LOST, SHARE, BROKEN, RESCUE, GIFT)
