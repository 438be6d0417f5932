"""The word lists from which the demo model's text is generated."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES: tuple[str, ...] = _words("""
    Ada Adam Alan Alba Alice Alma Amir Amy Anders Andrew Anna Anton Arno Arthur Astrid Axel Bella Ben
    Bert Boris Boyd Bruno Carl Carmen Cecil Celia Chloe Clara Cora Cyrus Dana Daniel Dario Dave David
    Della Diego Dora Doris Dylan Edgar Edith Eli Elisa Ella Elmer Elsa Emil Emma Enzo Erik Esme Ethan
    Eva Felix Fiona Flora Floyd Frank Freya Gabe Gemma Gerda Gina Glen Grace Greta Gus Hanna Hans Harry
    Hazel Heidi Helen Henry Hilda Hugo Ian Ida Igor Ingrid Irma Isaac Ivan Jack Jacob James Jana Jane
    Jasper Joan Joel John Jonas Julia Juno Karin Karl Katie Keith Kira Kurt Lara Laura Lena Leo Lewis
    Lina Linda Lisa Lloyd Lola Lucas Lucy Luna Lydia Mabel Marco Maria Mark Martha Max Maya Mia Miles
    Mina Mona Nadia Naomi Ned Nina Noah Nora Oded Olaf Olga Oliver Omar Oscar Otto Owen Paul Pedro Penny
    Peter Pia Quentin Ralph Ramon Rita Robert Roger Rosa Ruby Rufus Ruth Sally Sam Sandra Sara Simon
    Sofia Sonja Stella Sven Tara Ted Tessa Theo Thomas Tilda Tim Tina Toby Tom Ursula Vera Victor Vivian
    Walter Wanda Wendy Willa Xenia Yara Yusuf Zara Zeno Zoe
    """)

CONSONANTS = "bdfghjklmnprstvz"

VOWELS = "aeiou"

NUMBERS: tuple[str, ...] = tuple(str(number) for number in range(10, 100))

COLOURS: tuple[str, ...] = _words("""
    red blue green yellow orange purple pink brown black white grey gold silver violet
    """)

ANIMALS: tuple[str, ...] = _words("""
    dog cat horse rabbit parrot hamster goat sheep pony duck goose turtle donkey mouse
    """)

FRUITS: tuple[str, ...] = _words("""
    apple pear plum cherry lemon melon grape mango peach banana fig lime quince berry
    """)

PEOPLE: tuple[str, ...] = _words("""
    farmer teacher doctor baker sailor painter gardener student neighbour child singer writer
    """)

ADJECTIVES: tuple[str, ...] = _words("""
    old young small tall quiet happy kind clever tired brave gentle busy friendly careful
    """)

PLACES: tuple[str, ...] = _words("""
    river garden market house school bridge forest village harbour kitchen station field library
    """)

THINGS: tuple[str, ...] = _words("""
    book letter basket lamp table chair bag boat picture key cup blanket coat bread
    """)

MOTIONS: tuple[str, ...] = _words("walks runs goes comes sits waits sings sleeps works rests")

DEEDS: tuple[str, ...] = _words("carries finds buys sees likes needs paints repairs brings keeps")

QUALITIES: tuple[str, ...] = _words("new old clean heavy light warm")

DIRECTIONS: tuple[str, ...] = ("to the", "near the", "behind the", "at the")

TIMES: tuple[str, ...] = (
    "in the morning",
    "in the evening",
    "every day",
    "after the rain",
    "before lunch",
    "in summer",
    "in winter",
    "at night",
)
