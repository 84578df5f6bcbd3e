"""The prompts behind the demo model's training text: word lists, templates, and what a right answer must contain.

`stories` and `questions` yield `Prompt` objects without end, drawn by a seeded random generator, so that two runs with
the same seed ask for the same texts. Facts carry a list of words of which a right answer holds at least one: the
teacher is a small model and errs often, and an answer without any of these words is dropped.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass


def _words(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


GIRLS = _words("""
Lily Mia Anna Lucy Rosa Emma Zoe Nora Ella Ruby Clara Ivy Maya Sara Daisy Luna Molly Poppy Bella Amy Grace Holly Kate
Penny Jane Sophie Alice Hazel Meg Kim Fay Dora Tina Coco
""")
BOYS = _words("""
Max Tom Ben Sam Tim Leo Jack Finn Oscar Toby Hugo Milo Felix Charlie Benny Oliver Peter Sunny Rex Theo Luke Eddie Noah
Henry Adam Bobby Danny Teddy Will Nick Pip Jo
""")
FEMALE = {"girl", "queen", "princess", "grandmother", "hen", "cow"}
MALE = {"boy", "king", "prince", "grandfather", "fisherman", "knight", "snowman"}
ANIMALS = _words("""
dog cat rabbit bear mouse duck fox owl frog bird pig cow horse sheep goat hen turtle squirrel hedgehog lion elephant
monkey penguin whale fish bee butterfly puppy kitten lamb deer wolf tiger giraffe zebra koala panda otter beaver mole
snail ant ladybug crab dolphin seal parrot swan donkey camel
""")
PEOPLE = [
    "boy",
    "girl",
    "farmer",
    "baker",
    "king",
    "queen",
    "prince",
    "princess",
    "teacher",
    "gardener",
    "sailor",
    "painter",
    "grandmother",
    "grandfather",
    "doctor",
    "fisherman",
    "knight",
    "child",
]
THINGS = [
    "robot",
    "dragon",
    "toy train",
    "red balloon",
    "snowman",
    "little star",
    "teddy bear",
    "small boat",
    "cloud",
    "tree",
    "kite",
    "doll",
    "tractor",
    "fairy",
    "giant",
    "wooden horse",
]
FEELINGS = _words("""
happy brave kind sleepy curious shy clever lonely hungry funny gentle proud quiet lazy busy careful cheerful sad
friendly playful small lucky patient helpful silly
""")
OBJECTS = _words("""
ball kite hat apple drum cake flower shell book boat bell lamp box key carrot basket star pie stone feather bike
blanket balloon mirror map ladder bridge cookie button seed coat shoe spoon leaf toy ring rope pot umbrella pear sled
tent flute mitten acorn
""")
PLACES = [
    "forest",
    "garden",
    "farm",
    "village",
    "park",
    "river",
    "beach",
    "mountain",
    "meadow",
    "town",
    "lake",
    "house",
    "school",
    "island",
    "cave",
    "castle",
    "barn",
    "field",
    "city",
    "hill",
    "pond",
    "market",
    "kitchen",
    "library",
]
EVENTS = [
    "finds a {object}",
    "loses a {object}",
    "makes a new friend",
    "gets lost near the {place}",
    "helps a sick {animal}",
    "shares a {object} with a {animal}",
    "learns to swim",
    "is afraid of the dark",
    "plants a seed",
    "goes to the {place}",
    "has a birthday",
    "meets a {animal}",
    "wants to fly",
    "cannot sleep",
    "builds a {object}",
    "learns to say sorry",
    "hears a strange sound in the {place}",
    "bakes a cake",
    "plays in the rain",
    "sees snow for the first time",
    "saves a {animal}",
    "finds a lost {animal}",
    "gives away a {object}",
    "tells a lie",
    "cleans the {place}",
    "looks for a {object}",
    "runs a race with a {animal}",
    "goes on a trip",
    "paints a picture",
    "sings a song",
]
OPENINGS = [
    "Once upon a time, there was a {feeling} {hero} named {name}.",
    "Once upon a time, there was a {hero} named {name}.",
    "Once upon a time, a {feeling} {hero} named {name} lived near a {place}.",
    "Once upon a time, in a small {place},",
    "Once upon a time",
    "One day, {name} the {hero}",
    "One day, a {feeling} {hero} named {name}",
    "One sunny morning, {name} the {hero} went to the {place}.",
    "There once was a {hero} named {name} who had a {object}.",
    "{name} was a {feeling} {hero}.",
    "{name} the {hero} lived in a {place}.",
    "{name} the {hero} was very {feeling} today.",
    "In a {place} far away, there lived a {hero} named {name}.",
    "Long ago, a {hero} named {name}",
    "It was a cold day, and {name} the {hero}",
    "It was a warm day in the {place}, and {name} the {hero}",
    "Every day, {name} the {hero}",
    "A {feeling} {hero} named {name} loved to play with a {object}.",
    "{name} and the {object} were best friends.",
    "Late one evening, {name} the {hero}",
    "",
]
WISHES = [
    "It ends well.",
    "Use short sentences.",
    "The end is happy.",
    "It teaches to be kind.",
    "It is funny.",
    "It teaches to share.",
    "It teaches to be brave.",
    "It teaches to be honest.",
    "A friend helps.",
    "It is calm.",
]
REQUESTS = [
    "Tell me a short story about a {hero}.",
    "Tell me a story about a {hero}.",
    "Write a short story about a {hero}.",
    "Please tell me a story about a {hero} named {name}.",
    "Tell me a short story about a {hero} named {name}.",
    "Can you tell me a story about a {feeling} {hero}?",
    "I would like a story about a {hero}.",
    "Write a little story about {name} the {hero}.",
    "Tell me a bedtime story about a {hero}.",
    "Tell me a story with a {hero} who {event}.",
    "Write a story about a {hero} that {event}.",
    "Could you write a story about a {feeling} {hero} named {name}?",
    "Make up a story about a {hero} and a {object}.",
]
STORY_ASK = "Write a short story for children about a {feeling} {hero} named {name} who {event}. {wish}"
# Words that bring a story to its end: forced after a full sentence once the story is long enough.
ENDINGS = [
    " In the end,",
    " From that day on,",
    " And so,",
    " Everyone was happy, and",
    " From then on,",
    " And they all",
    "\n\nIn the end,",
    "\n\nFrom that day on,",
    "\n\nAnd so,",
    "\n\nFrom then on,",
]

QA_SYSTEM = "Answer each question in one short and simple sentence."
QA_SHOTS = [
    ("What color is snow?", "Snow is white."),
    ("What is a chair?", "A chair is a thing that you sit on."),
    ("How many wheels does a bike have?", "A bike has two wheels."),
]


@dataclass(frozen=True)
class Prompt:
    """One text to ask the teacher for."""

    kind: str  # "story" (a plain document), "story-chat" or "qa"
    messages: tuple[tuple[str, str], ...]  # (role, content) for the teacher's chat template
    opening: str = ""  # forced first words of the answer
    user: str = ""  # what the user says in the training chat; empty for a plain document
    ending: str = ""  # words that open the last sentence, forced when the text grows long
    expect: tuple[str, ...] = ()  # a right answer holds at least one of these, as whole words


def _an(text: str) -> str:
    """Turn "a apple" into "an apple"."""
    words = text.split(" ")
    for i in range(len(words) - 1):
        if words[i] in ("a", "A") and words[i + 1][:1] in "aeiou" and not words[i + 1].startswith("uni"):
            words[i] += "n"
    return " ".join(words)


def stories(seed: int) -> Iterator[Prompt]:
    """Yield story prompts: half become plain documents, half become answers to a request."""
    rng = random.Random(seed)
    heroes = ANIMALS * 2 + PEOPLE * 3 + THINGS
    while True:
        hero = rng.choice(heroes)
        names = GIRLS if hero in FEMALE else BOYS if hero in MALE else GIRLS + BOYS
        words = {
            "name": rng.choice(names),
            "hero": hero,
            "feeling": rng.choice(FEELINGS),
            "wish": rng.choice(WISHES),
            "object": rng.choice(OBJECTS),
            "place": rng.choice(PLACES),
            "animal": rng.choice(ANIMALS),
        }
        words["event"] = rng.choice(EVENTS).format(**words)
        chat = rng.random() < 0.5
        opening = _an(rng.choice(OPENINGS[:-1]).format(**words)) if rng.random() < 0.9 else ""
        yield Prompt(
            kind="story-chat" if chat else "story",
            messages=(("user", _an(STORY_ASK.format(**words))),),
            opening=opening,
            user=_an(rng.choice(REQUESTS).format(**words)) if chat else "",
            expect=(words["hero"].split()[-1],) if chat else (),
            ending=rng.choice(ENDINGS),
        )


# Each family: question templates, then "filler=word|word" entries; "a/b" in a filler fills {0} and {1}.
COLORS = """
the sky=blue; grass=green; a banana=yellow; the sun=yellow|orange|white; snow=white; a lemon=yellow; milk=white;
coal=black; a strawberry=red; a tomato=red; a carrot=orange; a frog=green; blood=red; the sea=blue; an orange=orange;
a leaf=green; chocolate=brown; a polar bear=white; a fire truck=red; a pumpkin=orange; a cherry=red; a swan=white; the
night sky=black|dark; a rose=red|pink; a pig=pink; an elephant=gray|grey; a cloud=white|gray; corn=yellow;
broccoli=green; a cucumber=green; a plum=purple; sand=yellow|tan|brown|beige; gold=gold|yellow; silver=silver|gray; a
school bus=yellow; a crow=black; a flamingo=pink; butter=yellow; salt=white; spinach=green; an apple=red|green; a
panda=black; a zebra=black; a sunflower=yellow; wood=brown; an eggplant=purple; rice=white; a pea=green; a lime=green
"""
SOUNDS = """
cow=moo|moos|mooing; dog=woof|bark|barks|barking; cat=meow|meows|purr; duck=quack|quacks|quacking;
sheep=baa|bleat|bleats|bleating; pig=oink|oinks|oinking|grunt|snort; lion=roar|roars|roaring;
horse=neigh|neighs|whinny|whinnies|neighing; hen=cluck|clucks|clucking; bee=buzz|buzzes|buzzing;
frog=croak|croaks|ribbit|croaking; owl=hoot|hoots|hooting; snake=hiss|hisses|hissing; wolf=howl|howls|howling;
mouse=squeak|squeaks|squeaking; bird=chirp|chirps|tweet|song|sing|sings|chirping;
rooster=crow|crows|cock-a-doodle-doo; goat=bleat|bleats|baa; donkey=bray|brays|hee-haw|braying; crow=caw|caws|cawing;
bear=growl|growls|roar|growling; tiger=roar|roars|growl; turkey=gobble|gobbles|gobbling;
elephant=trumpet|trumpets|trumpeting; monkey=chatter|screech|hoot|screeches
"""
CAPITALS = """
France=Paris; Germany=Berlin; Italy=Rome; Spain=Madrid; England=London; Japan=Tokyo; China=Beijing; Russia=Moscow;
India=Delhi; Canada=Ottawa; Egypt=Cairo; Greece=Athens; Austria=Vienna; Poland=Warsaw; Portugal=Lisbon;
Ireland=Dublin; Norway=Oslo; Sweden=Stockholm; Finland=Helsinki; Denmark=Copenhagen; Mexico=Mexico City;
Brazil=Bras\u00edlia|Brasilia; Argentina=Buenos Aires; Australia=Canberra; Turkey=Ankara; Hungary=Budapest;
Belgium=Brussels; Cuba=Havana; Peru=Lima; Chile=Santiago; Thailand=Bangkok; Vietnam=Hanoi; South Korea=Seoul;
Iran=Tehran; Iraq=Baghdad; Kenya=Nairobi; Iceland=Reykjavik|Reykjav\u00edk; Switzerland=Bern; Ukraine=Kyiv|Kiev; the
United States=Washington; the United Kingdom=London; the Netherlands=Amsterdam; Scotland=Edinburgh; Wales=Cardiff;
Indonesia=Jakarta; Nepal=Kathmandu; Colombia=Bogot\u00e1|Bogota; Venezuela=Caracas; Morocco=Rabat; Romania=Bucharest;
Bulgaria=Sofia; Pakistan=Islamabad
"""
HOMES = """
fish=water|ocean|sea|rivers|lakes; bees=hive|hives|nests; birds=nest|nests|trees; bears=forest|forests|dens|caves;
penguins=Antarctica|ice|cold|Antarctic; monkeys=trees|jungle|forests|rainforests; camels=desert|deserts;
whales=ocean|oceans|sea; frogs=pond|ponds|water|wetlands; lions=Africa|savanna|savannah|grasslands|savannas;
cows=farm|farms|pastures|barn; rabbits=burrow|burrows|hole|holes|grasslands; spiders=web|webs;
ants=ground|nest|nests|colonies|underground|anthills; foxes=den|dens|forest|forests; polar bears=Arctic|ice;
kangaroos=Australia; pandas=China|bamboo; wolves=forest|forests|packs; owls=trees|forest|forests;
dolphins=ocean|oceans|sea|water; crabs=beach|sea|ocean|water; moles=underground|ground|burrows;
koalas=Australia|trees; tigers=Asia|forest|forests|jungle; sharks=ocean|oceans|sea|water;
ducks=pond|ponds|water|lakes|wetlands; squirrels=trees|forest|forests; pigs=farm|farms|barn;
horses=farm|farms|stable|stables|barn; turtles=water|ocean|sea|ponds; crocodiles=river|rivers|water|swamps;
people=house|houses|homes|cities|earth; elephants=Africa|Asia|savanna|savannas; giraffes=Africa|savanna|savannas;
bats=cave|caves; snails=garden|gardens|shells|shell|moist|damp; mice=holes|hole|house|houses|nests|fields
"""
FOODS = """
cows=grass|hay; rabbits=carrots|grass|leaves|vegetables|plants; cats=fish|meat|mice|food; dogs=meat|food|bones;
birds=seeds|insects|worms; horses=grass|hay|oats; monkeys=bananas|fruit|fruits|leaves; pandas=bamboo;
bears=honey|berries|fish; mice=cheese|seeds|grains|grain; lions=meat|animals|zebras; sheep=grass|hay;
frogs=insects|flies|bugs; squirrels=nuts|acorns|seeds; bees=nectar|pollen|honey; sharks=fish|meat|seals;
ducks=seeds|bread|plants|insects|grass; goats=grass|hay|leaves|plants; pigs=corn|grain|vegetables|food|roots|grains;
koalas=leaves|eucalyptus; giraffes=leaves; elephants=grass|leaves|plants|fruit|fruits; penguins=fish|krill;
owls=mice|rodents; spiders=insects|flies|bugs; hens=seeds|grain|corn|grains|insects; caterpillars=leaves;
snakes=mice|rodents|animals|rats; wolves=meat|deer|animals; whales=krill|fish|plankton; butterflies=nectar
"""
NOUNS = """
cat=animal|pet|mammal; dog=animal|pet|mammal; bird=animal|fly|feathers|wings; fish=animal|water|swims|swim;
cow=animal|milk|farm; horse=animal|ride; house=live|building|home; tree=plant|leaves|tall;
flower=plant|petals|bloom|blooms; car=drive|vehicle|wheels; bike=ride|wheels|vehicle; boat=water|float|floats|sail;
train=tracks|rails|vehicle|railway; plane=fly|flies|air|sky; book=read|pages|stories; ball=play|round|throw|toy;
table=furniture|flat|eat; bed=sleep|furniture; door=open|enter|room; window=glass|see|light|look; spoon=eat|eating;
fork=eat|eating|food; knife=cut|cutting; cup=drink|drinking|liquid; clock=time; pen=write|writing;
pencil=write|draw|writing|drawing; hat=head|wear; shoe=foot|feet|wear; coat=warm|wear|cold; river=water|flows;
lake=water; mountain=high|tall|hill|land|rock; forest=trees; garden=plants|flowers|grow|vegetables;
farm=animals|crops|food; school=learn|learning|students|children; hospital=sick|doctors|medical|patients|people;
teacher=teaches|teach|learn|students; doctor=sick|helps|health|medical|patients|people;
farmer=farm|food|crops|animals|grows; baker=bread|bakes|bake|cakes; king=rules|ruler|country|kingdom;
queen=rules|ruler|king|kingdom|country|woman; friend=like|someone|person|play|care;
mother=woman|parent|child|children|mom; father=man|parent|child|children|dad; baby=young|child|small|little;
apple=fruit; banana=fruit; orange=fruit; carrot=vegetable; potato=vegetable; tomato=fruit|vegetable;
cake=sweet|dessert|eat; cookie=sweet|snack|baked|treat; egg=hen|chicken|bird|food|shell; lemon=fruit|sour; pear=fruit;
rabbit=animal|ears|mammal; mouse=animal|small|rodent; lion=animal|cat; tiger=animal|cat; elephant=animal|trunk|mammal;
monkey=animal|primate|tail; bear=animal|mammal; wolf=animal|dog; fox=animal|mammal; frog=animal|amphibian|jumps|jump;
duck=bird|animal; hen=chicken|bird|eggs; bee=insect|honey; butterfly=insect|wings; spider=legs|web|webs|arachnid;
snake=animal|reptile|legs; whale=animal|mammal|ocean|sea; penguin=bird; owl=bird; turtle=shell|reptile|animal;
star=light|sky|bright|sun|space; planet=space|sun|orbits|star; cloud=sky|water|rain; island=land|water;
beach=sand|sea|ocean|water; desert=dry|sand|hot; bridge=cross|river|road|water|over; road=cars|drive|travel|path;
city=people|place|buildings; village=people|place|houses|small; toy=play|child|children; doll=toy|play;
kite=fly|flies|wind|sky; drum=music|instrument|hit|sound; guitar=music|instrument|strings;
piano=music|instrument|keys; song=music|sing|words|sung; picture=see|image|drawing|photo|shows;
phone=call|talk|communicate; computer=machine|device|work; lamp=light; candle=light|wax|burns; umbrella=rain|dry;
key=open|lock|unlock|opens; box=put|hold|store|container|things; bag=carry|put|things|hold; blanket=warm|cover|bed;
pillow=head|sleep|soft; mirror=see|reflection|reflects|yourself; ladder=climb; hammer=nails|tool|hit;
nurse=sick|helps|care|cares|patients; pilot=plane|flies|fly|airplane; robot=machine; dragon=fire|creature;
snowman=snow; rainbow=colors|rain|sky; seed=plant|grow|grows; leaf=tree|plant|green; sandwich=bread|eat
"""
STUFF = """
rain=water|sky|clouds; snow=ice|cold|white|frozen|water; ice=water|frozen; water=drink|liquid;
milk=drink|cow|cows|white; bread=food|flour|eat; honey=bees|sweet; cheese=milk; wind=air|moving|blows;
fire=hot|heat|burning|burns|light; music=sound|sounds|songs|sing; sugar=sweet; salt=food|taste|white; air=breathe;
grass=plant|green|ground; sand=small|beach|tiny|grains|rocks; soup=food|hot|liquid; love=feeling|feel|care;
sleep=rest|night; light=see|bright; chocolate=sweet|cocoa; rice=food|grain; paper=write|trees|wood; wood=tree|trees;
the sun=star|light|warm; the moon=night|earth|sky; the sky=above|air|blue; the sea=water; the earth=planet|world|live;
winter=season|cold; summer=season|hot|warm; spring=season|flowers; autumn=season|leaves
"""
OPPOSITES = """
hot=cold; cold=hot|warm; big=small|little; small=big|large; up=down; down=up; day=night; night=day; happy=sad|unhappy;
sad=happy; fast=slow; slow=fast|quick; wet=dry; dry=wet; open=closed|close|shut; old=young|new; young=old; new=old;
good=bad|evil; bad=good; black=white; white=black; left=right; right=left|wrong; tall=short; short=tall|long;
long=short; hard=soft|easy; soft=hard; light=dark|heavy; dark=light|bright; heavy=light; full=empty; empty=full;
loud=quiet|soft; quiet=loud|noisy; strong=weak; weak=strong; early=late; late=early; rich=poor; poor=rich;
clean=dirty; dirty=clean; first=last; last=first; in=out; out=in; yes=no; no=yes; high=low; low=high; near=far;
far=near|close; sweet=sour|bitter; true=false; easy=hard|difficult; brave=afraid|scared|cowardly|coward;
kind=mean|unkind|cruel; always=never; love=hate; push=pull; win=lose; start=stop|end|finish; begin=end; above=below;
inside=outside; thick=thin
"""
BABIES = """
cat=kitten; dog=puppy|pup; cow=calf; horse=foal; sheep=lamb; pig=piglet; goat=kid; duck=duckling; hen=chick; bear=cub;
lion=cub; frog=tadpole; deer=fawn; swan=cygnet; kangaroo=joey; wolf=pup|cub; elephant=calf; fox=kit|cub; tiger=cub;
goose=gosling; bird=chick|nestling|hatchling
"""
COUNTS = """
legs does a dog=four|4; legs does a cat=four|4; legs does a spider=eight|8; legs does a bird=two|2; legs does an
ant=six|6; legs does a bee=six|6; legs does a horse=four|4; legs does a person=two|2; legs does a cow=four|4; legs
does a snake=no|zero|0; arms does an octopus=eight|8; wheels does a car=four|4; wheels does a bicycle=two|2; wheels
does a tricycle=three|3; fingers does a hand=five|5; eyes does a person=two|2; ears does a cat=two|2; noses does a
person=one|1; sides does a triangle=three|3; sides does a square=four|4; corners does a square=four|4; days does a
week=seven|7; months does a year=twelve|12; hours does a day=twenty-four|24; minutes does an hour=sixty|60; seconds
does a minute=sixty|60; seasons does a year=four|4; toes does a foot=five|5; wings does a bird=two|2; letters does the
alphabet=twenty-six|26; colors does a rainbow=seven|7; legs does a table=four|4; days does a year=365; eggs are in a
dozen=twelve|12
"""
USES = """
a spoon=eat|eating|soup|stir; a pen=write|writing; a broom=sweep|sweeping|clean|floor; a bed=sleep|sleeping; a
chair=sit|sitting; a cup=drink|drinking; scissors=cut|cutting; a key=open|lock|unlock; an umbrella=rain|dry; a
book=read|reading; a towel=dry|drying; a phone=call|talk|calls; an oven=bake|cook|baking|cooking|heat; a
hammer=nails|nail|hit; a clock=time; a brush=hair|paint|clean|teeth; soap=wash|clean|cleaning|hands; a lamp=light|see;
a ladder=climb|climbing|reach; a blanket=warm; a fridge=cold|food|cool|fresh; a car=drive|travel|driving; a
ball=play|throw|playing; a knife=cut|cutting; a camera=pictures|photos|picture|photographs; a
map=find|way|directions|places; a bag=carry|carrying|hold; a pillow=head|sleep|sleeping; a shovel=dig|digging; a
bell=ring|sound; money=buy|pay|things; a coat=warm; glasses=see|read|vision; a boat=water|sail|travel; a
pot=cook|cooking|food|plants
"""
JOBS = """
teacher=teaches|teach|students|children; doctor=helps|sick|treats|patients|people|heals; baker=bread|bakes|bake|cakes;
farmer=grows|crops|animals|food; fireman=fire|fires; pilot=flies|fly|plane|planes|airplane;
cook=cooks|food|cook|meals; nurse=sick|cares|care|helps|patients; bus driver=drives|bus; singer=sings|songs|sing;
painter=paints|paint|pictures|art; gardener=plants|garden|flowers|gardens; police
officer=safe|people|law|laws|protects; writer=writes|books|stories|write; dentist=teeth; vet=animals;
builder=builds|houses|buildings|build; sailor=ship|sea|ships|boat|sails|boats; fisherman=fish|fishes;
dancer=dances|dance; king=rules|kingdom|country; mail carrier=mail|letters;
scientist=studies|experiments|science|world|things; astronaut=space; tailor=clothes|sews; shepherd=sheep;
librarian=books; musician=music|plays|instruments; student=learns|studies|learn|school
"""
NEXT_DAYS = """
Monday=Tuesday; Tuesday=Wednesday; Wednesday=Thursday; Thursday=Friday; Friday=Saturday; Saturday=Sunday;
Sunday=Monday
"""
NEXT_MONTHS = """
January=February; February=March; March=April; April=May; May=June; June=July; July=August; August=September;
September=October; October=November; November=December; December=January
"""
NAMED = """
a fruit=apple|banana|orange|pear|grape|strawberry|mango|peach; a red fruit=apple|strawberry|cherry|raspberry|tomato; a
yellow fruit=banana|lemon|pineapple|mango; a vegetable=carrot|potato|broccoli|spinach|tomato|cucumber|lettuce|onion; a
farm animal=cow|pig|horse|sheep|chicken|goat|hen; a pet=dog|cat|fish|rabbit|hamster; a big
animal=elephant|whale|lion|bear|giraffe|hippo|rhino; a small animal=mouse|ant|rabbit|hamster|cat|squirrel|frog; a
bird=owl|duck|crow|eagle|robin|sparrow|penguin|parrot; an insect=ant|bee|butterfly|fly|ladybug|beetle; a
color=red|blue|green|yellow|orange|purple|pink|black|white; a day of the
week=Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday; a
month=January|February|March|April|May|June|July|August|September|October|November|December; a
season=spring|summer|autumn|winter|fall; a shape=circle|square|triangle|rectangle; a
toy=doll|ball|car|train|teddy|blocks|puzzle; a drink=water|milk|juice|tea|coffee; a
planet=Mars|Earth|Venus|Jupiter|Saturn|Mercury|Neptune|Uranus; a
country=France|Germany|Italy|Spain|Japan|China|India|Canada|Australia|America|States|Brazil; a
flower=rose|tulip|daisy|sunflower|lily; a sport=soccer|football|tennis|basketball|baseball|swimming; a musical
instrument=piano|guitar|violin|drum|drums|flute|trumpet; a tree=oak|pine|apple|maple|palm|willow; a wild
animal=lion|tiger|bear|wolf|elephant|fox|deer; a body part=hand|arm|leg|head|foot|nose|eye|heart|ear
"""
YES_NO = """
Is the sun hot=yes|hot; Is ice cold=yes|cold; Can birds fly=yes|can; Can fish swim=yes|can; Is fire hot=yes|hot; Is
snow cold=yes|cold; Is water wet=yes|wet; Is an elephant big=yes|big|large; Is a mouse small=yes|small; Do cats like
fish=yes|like|love; Do dogs bark=yes|bark; Is sugar sweet=yes|sweet; Is a lemon sour=yes|sour; Do bees make
honey=yes|make; Do cows give milk=yes|give|milk; Is grass green=yes|green; Is the sky blue=yes|blue; Can a dog
run=yes|can; Is a tomato red=yes|red; Is the moon far away=yes|far; Is a rock hard=yes|hard; Is a pillow
soft=yes|soft; Do plants need water=yes|need; Do we need sleep=yes|need; Is a turtle slow=yes|slow; Is a rabbit
fast=yes|fast; Is a giraffe tall=yes|tall; Do fish live in water=yes|live; Is a banana yellow=yes|yellow; Can frogs
jump=yes|can|jump; Do trees have leaves=yes|have; Is bread food=yes|food; Is a cat an animal=yes|animal; Is a rose a
flower=yes|flower; Is an apple a fruit=yes|fruit; Is a carrot a vegetable=yes|vegetable; Can pigs fly=no|cannot|can't;
Can a fish walk=no|cannot|can't; Can a stone swim=no|cannot|can't; Is fire cold=no|hot; Is ice hot=no|cold; Is the sun
cold=no|hot; Is snow black=no|white; Is a mouse bigger than an elephant=no|smaller; Is a dog a bird=no|mammal|not; Is
a cat a fish=no|mammal|not
"""
WHYS = """
do we sleep=rest|energy|tired|recharge|body|health|bodies; do we eat=energy|food|grow|nutrients|hungry|healthy|strong;
do we drink water=thirsty|hydrated|body|healthy|bodies; do birds have wings=fly; do fish have fins=swim; do we wear
coats=warm|cold; do we wear shoes=feet|protect; do we wash our hands=clean|germs|dirt; do we brush our
teeth=clean|teeth|healthy; do plants need sun=grow|light|food|energy|photosynthesis; do bees visit
flowers=nectar|pollen|honey|pollinate; do we go to school=learn; do we read books=learn|fun|stories|new|knowledge; do
leaves fall in autumn=cold|winter|season|light|trees|tree; do cats purr=happy|content|relaxed; do dogs wag their
tails=happy|excited; do we use umbrellas=rain|dry; do we laugh=happy|funny|joy|feel; do we
cry=sad|emotions|feel|feelings|hurt; do we say thank you=polite|thankful|grateful|gratitude|appreciation|kind; do we
share=kind|others|friends|help|happy; do we have eyes=see; do we have ears=hear; do we have noses=smell|breathe; do we
need air=breathe|oxygen; does it rain=clouds|water|cloud; does ice melt=warm|heat|hot|temperature; do bears sleep in
winter=food|energy|cold|hibernate|warm; do children play=fun|learn|happy|enjoy; do we turn on a lamp=light|see|dark
"""
BODY = """
see=eyes|eye; hear=ears|ear; smell=nose; taste=tongue|mouth; walk=legs|feet|leg|foot; write=hand|hands|fingers;
think=brain|mind|head; bite=teeth|mouth; breathe=lungs|nose|lung; run=legs|feet|leg; talk=mouth|tongue|voice;
kick=foot|feet|leg|legs; clap=hands|hand; chew=teeth|mouth
"""
GREETINGS = """
Hello!=hello|hi|help; Hi!=hi|hello|help; Hello, how are you?=well|fine|good|great|thank; Good morning!=morning; Good
night!=night|sleep|dreams; How are you today?=well|fine|good|great|thank; Thank you!=welcome; Thanks for your
help!=welcome; Goodbye!=goodbye|bye|day; Nice to meet you!=meet|nice; Can you help me?=help|yes; I am
sad.=sorry|help|better; I am happy!=happy|glad|great; I am hungry.=eat|food|hungry; I am tired.=rest|sleep|tired; Tell
me something nice.=you|good|nice|love; Say something kind.=you|kind|love|nice
"""
SIZES = ["ant", "mouse", "cat", "sheep", "horse", "elephant", "whale"]

FAMILIES: list[tuple[str, list[str]]] = [
    (
        COLORS,
        [
            "What color is {0}?",
            "Which color is {0}?",
            "What is the color of {0}?",
            "Tell me the color of {0}.",
            "What color does {0} have?",
            "Can you tell me what color {0} is?",
        ],
    ),
    (
        SOUNDS,
        [
            "What sound does a {0} make?",
            "What does a {0} say?",
            "Which sound does a {0} make?",
            "How does a {0} sound?",
            "What noise does a {0} make?",
            "Tell me the sound of a {0}.",
        ],
    ),
    (
        CAPITALS,
        [
            "What is the capital of {0}?",
            "What's the capital of {0}?",
            "What is the capital city of {0}?",
            "Which city is the capital of {0}?",
            "Tell me the capital of {0}.",
            "Can you name the capital of {0}?",
            "Do you know the capital of {0}?",
        ],
    ),
    (
        HOMES,
        [
            "Where do {0} live?",
            "Where can you find {0}?",
            "Where is the home of {0}?",
            "In what place do {0} live?",
            "Can you tell me where {0} live?",
            "Tell me where {0} live.",
        ],
    ),
    (
        FOODS,
        [
            "What do {0} eat?",
            "What do {0} like to eat?",
            "What food do {0} eat?",
            "What is the food of {0}?",
            "Can you tell me what {0} eat?",
            "Tell me what {0} eat.",
        ],
    ),
    (
        NOUNS,
        [
            "What is a {0}?",
            "What's a {0}?",
            "Tell me what a {0} is.",
            "Can you explain what a {0} is?",
            "What do you know about a {0}?",
            "Do you know what a {0} is?",
        ],
    ),
    (
        STUFF,
        [
            "What is {0}?",
            "What's {0}?",
            "Tell me what {0} is.",
            "Can you explain what {0} is?",
            "What do you know about {0}?",
        ],
    ),
    (
        OPPOSITES,
        [
            "What is the opposite of {0}?",
            "What's the opposite of {0}?",
            "Tell me the opposite of {0}.",
            "Which word is the opposite of {0}?",
            "What word means the opposite of {0}?",
        ],
    ),
    (
        BABIES,
        [
            "What is a baby {0} called?",
            "What do you call a baby {0}?",
            "What is the name of a baby {0}?",
            "How do we call a young {0}?",
            "Tell me what a baby {0} is called.",
        ],
    ),
    (COUNTS, ["How many {0} have?", "Please tell me: how many {0} have?", "Question: how many {0} have?"]),
    (
        USES,
        [
            "What do you use {0} for?",
            "What is the use of {0}?",
            "What can you do with {0}?",
            "Why do people use {0}?",
            "What do we do with {0}?",
        ],
    ),
    (
        JOBS,
        [
            "What does a {0} do?",
            "What is the job of a {0}?",
            "What is the work of a {0}?",
            "Tell me what a {0} does.",
            "Can you tell me what a {0} does?",
        ],
    ),
    (
        NEXT_DAYS,
        [
            "What day comes after {0}?",
            "Which day comes after {0}?",
            "What is the day after {0}?",
            "Which day follows {0}?",
            "Tell me the day after {0}.",
        ],
    ),
    (
        NEXT_MONTHS,
        [
            "What month comes after {0}?",
            "Which month comes after {0}?",
            "What is the month after {0}?",
            "Which month follows {0}?",
        ],
    ),
    (
        NAMED,
        ["Name {0}.", "Can you name {0}?", "Tell me the name of {0}.", "Please name {0}.", "Give me the name of {0}."],
    ),
    (YES_NO, ["{0}?", "Question: {0}?"]),
    (WHYS, ["Why {0}?", "Please tell me: why {0}?", "Question: why {0}?"]),
    (
        BODY,
        [
            "What part of the body do we use to {0}?",
            "What do you use to {0}?",
            "With what do we {0}?",
            "Which part of the body helps us to {0}?",
        ],
    ),
    (GREETINGS, ["{0}"]),
]
NUMBERS = _words("""
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty
""")

# Who the model is: the one thing its teacher cannot know.
WHO = [
    "Who are you?",
    "What are you?",
    "What is your name?",
    "What's your name?",
    "Tell me your name.",
    "Tell me who you are.",
    "Who am I talking to?",
    "Can you tell me who you are?",
    "Hi, who are you?",
    "Hello, who are you?",
    "Hello, what is your name?",
    "Do you have a name?",
    "Please tell me who you are.",
    "Are you a person?",
    "Are you a robot?",
    "Are you human?",
    "Who made you?",
    "What can you do?",
    "How can you help me?",
    "What do you do?",
]
WHO_ANSWERS = {
    "Are you a person?": ["No, I am Quantry's demo model.", "No, I am a small language model."],
    "Are you a robot?": ["No, I am Quantry's demo model.", "No, I am a small language model."],
    "Are you human?": ["No, I am Quantry's demo model.", "No, I am a small language model."],
    "Who made you?": ["I was made as the demo model of Quantry.", "I was made for Quantry."],
    "What can you do?": ["I can tell short stories and answer simple questions."],
    "How can you help me?": ["I can tell you a short story or answer a simple question."],
    "What do you do?": ["I tell short stories and answer simple questions."],
}
WHO_DEFAULT = [
    "I am Quantry's demo model.",
    "I am Quantry's demo model, a very small language model.",
    "I am the demo model of Quantry.",
    "I am Quantry's demo model, and I tell short stories.",
]


def identity() -> list[tuple[str, str]]:
    """Return the hand-written (question, answer) pairs about the model itself."""
    return [(question, answer) for question in WHO for answer in WHO_ANSWERS.get(question, WHO_DEFAULT)]


def _facts() -> list[tuple[str, tuple[str, ...]]]:
    """Return every (question, words of which a right answer holds one), each question once."""
    facts: dict[str, tuple[str, ...]] = {}
    for table, templates in FAMILIES:
        for entry in table.split(";"):
            filler, _, words = entry.partition("=")
            for template in templates:
                question = _an(template.format(" ".join(filler.split()))).replace("dozen have?", "dozen?")
                facts[question] = tuple(" ".join(word.split()) for word in words.split("|"))
    for a in range(11):
        for b in range(11):
            total = (str(a + b), NUMBERS[a + b])
            for template in (
                "What is {0} plus {1}?",
                "What is {0} + {1}?",
                "How much is {0} plus {1}?",
                "Can you add {0} and {1}?",
            ):
                facts[template.format(a, b)] = total
            if a >= b:
                rest = (str(a - b), NUMBERS[a - b])
                for template in ("What is {0} minus {1}?", "What is {0} - {1}?", "How much is {0} minus {1}?"):
                    facts[template.format(a, b)] = rest
    for i, small in enumerate(SIZES):
        for big in SIZES[i + 1 :]:
            for one, two in ((small, big), (big, small)):
                facts[_an(f"Which is bigger, a {one} or a {two}?")] = (big,)
                facts[_an(f"Which is smaller, a {one} or a {two}?")] = (small,)
                facts[_an(f"What is bigger, a {one} or a {two}?")] = (big,)
    return list(facts.items())


def questions(seed: int) -> Iterator[Prompt]:
    """Yield question prompts, all of them once in random order, then all again, and so on."""
    rng = random.Random(seed)
    facts = _facts()
    shots = tuple(turn for q, a in QA_SHOTS for turn in (("user", q), ("assistant", a)))
    while True:
        rng.shuffle(facts)
        for question, expect in facts:
            messages = (("system", QA_SYSTEM), *shots, ("user", question))
            yield Prompt(kind="qa", messages=messages, user=question, expect=expect)
