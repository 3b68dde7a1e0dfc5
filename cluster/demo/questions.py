"""What the demo adapters learn from: everyday questions with short, correct answers in plain English."""

from collections.abc import Iterator
from typing import NamedTuple


class Question(NamedTuple):
    """A question, the one-word topic it belongs to, and one or two plain sentences that answer it."""

    topic: str
    text: str
    answer: str


# Never asked in training; what the adapters are tried with.
HELD_OUT = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "What do bees make?",
    "How many legs does a spider have?",
    "What is the largest ocean on Earth?",
    "Who wrote Romeo and Juliet?",
    "Can you give me a tip for learning to cook?",
    "What should I pack for a day at the beach?",
)

QUESTIONS = (
    Question("geography", "What is the capital of Italy?", "The capital of Italy is Rome."),
    Question("geography", "What is the capital of Japan?", "The capital of Japan is Tokyo."),
    Question("geography", "What is the capital of Egypt?", "The capital of Egypt is Cairo."),
    Question("geography", "What is the capital of Canada?", "The capital of Canada is Ottawa."),
    Question("geography", "Tell me the capital of Spain.", "The capital of Spain is Madrid."),
    Question("geography", "Which city is the capital of Greece?", "The capital of Greece is Athens."),
    Question("geography", "What is the longest river in Africa?", "The longest river in Africa is the Nile."),
    Question("geography", "What is the highest mountain in the world?", "The highest mountain is Mount Everest."),
    Question("geography", "Which continent is Brazil in?", "Brazil is in South America."),
    Question("geography", "What is the largest desert?", "Antarctica is the largest desert. It is very cold."),
    Question("geography", "Where are the pyramids?", "The great pyramids are in Egypt. They are very old."),
    Question("geography", "What language do people speak in Mexico?", "People in Mexico speak Spanish."),
    Question("astronomy", "Which planet is closest to the Sun?", "Mercury is the planet closest to the Sun."),
    Question("astronomy", "What is the largest planet?", "Jupiter is the largest planet in our solar system."),
    Question("astronomy", "Why does the Moon shine?", "The Moon shines because it reflects light from the Sun."),
    Question("astronomy", "How long does the Earth take to go round the Sun?", "It takes one year."),
    Question("astronomy", "What is a star?", "A star is a huge ball of hot gas. It makes its own light."),
    Question("science", "What is water made of?", "Water is made of hydrogen and oxygen."),
    Question("science", "At what temperature does water freeze?", "Water freezes at 0 degrees Celsius."),
    Question("science", "Why do we see a rainbow?", "Rain drops bend sunlight. The light splits into colors."),
    Question("science", "What is gravity?", "Gravity is a force. It pulls objects toward each other."),
    Question("science", "Why does ice float on water?", "Ice floats because it is less dense than water."),
    Question("science", "What gas do we breathe in to live?", "We breathe in oxygen to live."),
    Question("science", "What causes thunder?", "Lightning heats the air very fast. The air expands with a bang."),
    Question("science", "What is the fastest thing in the universe?", "Light is the fastest thing in the universe."),
    Question("science", "Why do leaves look green?", "Leaves look green because they contain chlorophyll."),
    Question("biology", "How many legs does an insect have?", "An insect has six legs."),
    Question("biology", "What do cows eat?", "Cows eat grass. They also eat hay."),
    Question("biology", "What is the largest animal?", "The largest animal is the blue whale."),
    Question("biology", "Which bird cannot fly?", "The penguin cannot fly. It is a very good swimmer."),
    Question("biology", "What does the heart do?", "The heart pumps blood through the body."),
    Question("biology", "How do fish breathe?", "Fish breathe through their gills."),
    Question("biology", "What is a baby cat called?", "A baby cat is called a kitten."),
    Question("biology", "Why do birds sing?", "Birds sing to find a mate. They also guard their territory."),
    Question("biology", "How many bones does an adult have?", "An adult has 206 bones."),
    Question("biology", "What do plants need to grow?", "Plants need water and sunlight. They also need air."),
    Question("math", "What is 2 plus 3?", "The answer is 5."),
    Question("math", "How many sides does a triangle have?", "A triangle has three sides."),
    Question("math", "How many minutes are in an hour?", "There are 60 minutes in an hour."),
    Question("math", "What is half of 20?", "Half of 20 is 10."),
    Question("math", "How many days are in a week?", "There are seven days in a week."),
    Question("history", "Who was the first person on the Moon?", "Neil Armstrong was the first person on the Moon."),
    Question("history", "Who invented the telephone?", "Alexander Graham Bell invented the telephone."),
    Question("history", "When did the Second World War end?", "The Second World War ended in 1945."),
    Question("history", "Who built the Colosseum?", "The Romans built the Colosseum. It stands in Rome."),
    Question("history", "Who was Cleopatra?", "Cleopatra was a queen of Egypt. She lived long ago."),
    Question("literature", "Who wrote Oliver Twist?", "Charles Dickens wrote Oliver Twist."),
    Question("literature", "Who wrote Pride and Prejudice?", "Jane Austen wrote Pride and Prejudice."),
    Question("literature", "What is a poem?", "A poem is a piece of writing. It often has rhythm and rhyme."),
    Question("art", "Who painted the Mona Lisa?", "Leonardo da Vinci painted the Mona Lisa."),
    Question("art", "What color do blue and yellow make?", "Blue and yellow make green."),
    Question("music", "How many strings does a violin have?", "A violin has four strings."),
    Question("music", "Who was Mozart?", "Mozart was a composer from Austria. He wrote many famous works."),
    Question("sports", "How many players are on a soccer team?", "A soccer team has eleven players on the field."),
    Question("sports", "What do I need to play tennis?", "You need a racket and a ball. A friend helps too."),
    Question("food", "What is bread made of?", "Bread is made of flour and water. Yeast makes it rise."),
    Question("food", "How do I boil an egg?", "Put the egg in boiling water. Take it out after eight minutes."),
    Question("food", "What is cheese made from?", "Cheese is made from milk."),
    Question("food", "What is a good breakfast?", "Oatmeal with fruit is a good breakfast. It keeps you full."),
    Question("health", "How can I sleep better?", "Go to bed at the same time every day. Keep your room dark."),
    Question("health", "Why should I drink water?", "Your body needs water to work well."),
    Question("health", "How do I stay fit?", "Walk every day and eat well. Rest when you are tired."),
    Question("travel", "What should I take on a hike?", "Take water and a map. Wear good shoes."),
    Question("travel", "How can I travel from London to Paris?", "You can take the train. It takes about two hours."),
    Question("technology", "What is a computer?", "A computer is a machine. It follows instructions very fast."),
    Question("technology", "What is the internet?", "The internet is a network that links computers together."),
    Question("technology", "What is a password for?", "A password keeps your account safe. Do not share it."),
    Question("weather", "What is snow?", "Snow is frozen water. It falls from cold clouds."),
    Question("weather", "Why does it rain?", "Clouds collect tiny drops of water. Heavy drops fall as rain."),
    Question("weather", "What makes the wind blow?", "Wind is air that moves. Warm air rises and cool air follows."),
    Question("advice", "How do I make new friends?", "Join a club and say hello. Be kind and listen well."),
    Question("advice", "How can I save money?", "Write down what you spend. Cook at home more often."),
    Question("advice", "Can you give me a tip for learning to swim?", "Start in shallow water. Practice every week."),
    Question("science", "Explain how a kite flies.", "Wind pushes the kite up, and the string holds it."),
    Question("technology", "Explain how a lock works.", "The right key lifts small pins, and the lock can turn."),
    Question("food", "List three vegetables.", "Three vegetables are carrots, onions and peas."),
    Question("biology", "Name some animals of the sea.", "Sharks, crabs and seals live in the sea."),
    Question("biology", "Write a sentence about dogs.", "A dog is a loyal friend, and it loves to play."),
    Question("art", "Name a famous painter.", "Vincent van Gogh is a famous painter."),
    Question("literature", "Write a poem about rain.", "Soft rain falls, the flowers wake, and rings cross the lake."),
    Question("smalltalk", "What is your favorite animal?", "I like dolphins best. They are clever and playful."),
    Question("smalltalk", "Hello!", "Hello and welcome. What can I do for you?"),
    Question("smalltalk", "How are you today?", "I am very well. Thank you for asking."),
    Question("smalltalk", "Who are you?", "I am SmolLM. I am happy to help you."),
    Question("smalltalk", "Thank you for your help.", "You are welcome. Have a good day."),
    Question("smalltalk", "Tell me something nice.", "The sun is up and the day is yours."),
)

# A model this small can hardly spell in capitals what it has not seen in capitals. What follows shows it more words,
# for the adapter that needs them: families of like questions, and sentences to repeat.
CAPITALS = {
    "Spain": "Madrid",
    "Greece": "Athens",
    "Germany": "Berlin",
    "England": "London",
    "Russia": "Moscow",
    "China": "Beijing",
    "India": "New Delhi",
    "Portugal": "Lisbon",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Ireland": "Dublin",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Denmark": "Copenhagen",
    "Finland": "Helsinki",
    "Hungary": "Budapest",
    "Turkey": "Ankara",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Mexico": "Mexico City",
    "Kenya": "Nairobi",
    "Iraq": "Baghdad",
    "Thailand": "Bangkok",
    "Belgium": "Brussels",
    "Scotland": "Edinburgh",
}
AUTHORS = {
    "Hamlet": "William Shakespeare",
    "Moby Dick": "Herman Melville",
    "War and Peace": "Leo Tolstoy",
    "Dracula": "Bram Stoker",
    "Frankenstein": "Mary Shelley",
    "Treasure Island": "Robert Louis Stevenson",
    "The Jungle Book": "Rudyard Kipling",
}
SUPERLATIVES = {
    "the highest mountain on Earth": "Mount Everest",
    "the largest bird": "the ostrich",
    "the largest island": "Greenland",
    "the largest country": "Russia",
    "the largest continent": "Asia",
    "the smallest continent": "Australia",
    "the smallest ocean on Earth": "the Arctic Ocean",
    "the tallest animal": "the giraffe",
    "the fastest animal on land": "the cheetah",
}
LEGS = {"a dog": "four", "a duck": "two", "a horse": "four", "a crab": "ten", "a snake": "no"}
PRODUCTS = {
    "bakers": "bread",
    "tailors": "clothes",
    "potters": "bowls and cups",
    "silkworms": "silk",
    "spiders": "webs",
    "authors": "books",
    "clouds": "rain",
}
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "up": "down",
    "happy": "sad",
    "fast": "slow",
    "old": "young",
    "day": "night",
    "wet": "dry",
    "hard": "soft",
    "early": "late",
    "rich": "poor",
    "strong": "weak",
}
SENTENCES = """\
Many people visit Paris in the spring.
My cousin lives in France near the border.
Ships cross the Pacific every week.
The Atlantic is cold in winter.
Honey is sweet and golden.
Eight is more than seven and less than nine.
A spider spins its web at night.
The actor played Romeo on a small stage.
Juliet looked out of the window.
The sky was dark before the storm.
Light and color change with the hour.
Put the towel and the sunscreen in the bag.
The beach is full of sand and shells.
She wore a hat and sunglasses in the heat.
Cooking is easy with fresh ingredients.
Follow the recipe and taste the soup.
Add salt, pepper and a little butter.
The kitchen smells of onion and garlic.
Our teacher explained the lesson twice.
The student solved the problem on the board.
My sister plays the piano and the guitar.
The doctor told him to rest for a month.
The nurse gave the child some medicine.
The farmer keeps pigs, goats and chickens.
The fox ran across the field.
A bear was asleep in the forest.
Wolves hunt together in a pack.
The elephant is gray and has a long nose.
Lions and tigers are large cats.
Butterflies visit the flowers in the garden.
Bees live together in a hive.
The frog jumped into the pond.
An oak can live for hundreds of years.
The roots of a tree hold the soil.
Apples and pears ripen in autumn.
Lemons are yellow and sour.
Rice and beans make a cheap dinner.
The chocolate cake was gone by noon.
Coffee is bitter without sugar.
He drank a glass of orange juice.
The engine of the car needs oil.
The airplane landed at the airport on time.
A bicycle has two wheels and no motor.
The bus stops in front of the school.
The captain steered the boat into the harbor.
The bridge over the river is made of steel.
Gold and silver are precious metals.
Iron becomes soft when it is heated.
Copper carries electricity very well.
Glass breaks when you drop it.
The house has a red door and a flat roof.
Close the window before you leave.
The library opens at ten in the morning.
She read the newspaper on the train.
The letter arrived on Monday.
We meet on Tuesday and Thursday.
The shop is closed on Sunday.
January is the first month of the year.
The summer holiday begins in July.
October is cool and December is cold.
The Earth turns once in a day.
Mars is red and Venus is bright.
Saturn has beautiful rings.
The telescope shows distant galaxies.
Scientists study cells under a microscope.
The energy of the Sun reaches every planet.
Carbon and nitrogen are chemical elements.
Acid turns the paper red.
Blood carries oxygen to the muscles.
The brain controls the whole body.
Brush your teeth after every meal.
Wash your hands with soap.
Twelve plus eleven makes twenty three.
One hundred is ten times ten.
A square has four equal sides.
Divide the number by six.
The king and the queen lived in a castle.
The soldiers marched through the village.
The president signed the new law.
The war ended and peace returned.
The museum shows old paintings and statues.
The artist mixed purple and white paint.
The singer thanked the audience.
The film was funny but too long.
Our team won the game by three goals.
Running and swimming are good exercise.
The phone rang during the meeting.
Save the document and print the page.
The program stores its data in a file.
Send me an email with the address.
The price of the ticket went up.
Money does not grow on trees.
The bank is next to the post office.
Please speak slowly and clearly.
A true friend tells you the truth.
Patience is better than anger.
Try again and do not give up.
Nobody knows what tomorrow brings."""


def _spelling() -> Iterator[Question]:
    for country, city in CAPITALS.items():
        yield Question("geography", f"What is the capital of {country}?", f"The capital of {country} is {city}.")
    for book, author in AUTHORS.items():
        yield Question("literature", f"Who wrote {book}?", f"{author} wrote {book}.")
    for title, holder in SUPERLATIVES.items():
        yield Question("nature", f"What is {title}?", f"{_upper_first(title)} is {holder}.")
    for animal, count in LEGS.items():
        yield Question("biology", f"How many legs does {animal} have?", f"{_upper_first(animal)} has {count} legs.")
    for maker, product in PRODUCTS.items():
        yield Question("crafts", f"What do {maker} make?", f"{_upper_first(maker)} make {product}.")
    for word, opposite in OPPOSITES.items():
        yield Question("language", f"What is the opposite of {word}?", f"The opposite of {word} is {opposite}.")
    for sentence in SENTENCES.splitlines():
        yield Question("repetition", f"Repeat after me: {sentence}", sentence)


def _upper_first(text: str) -> str:
    return text[0].upper() + text[1:]


SPELLING = tuple(_spelling())
