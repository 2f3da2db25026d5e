"""Prompts for `acceptance.py`: to chat about, and to be completed as they are: texts to copy or edit, and templates."""

from collections.abc import Iterator

from prompts import SHORT

CHAT = (
    *SHORT,
    "What should I look at before I buy a used bicycle?",
    "Write a function in JavaScript that reverses the words of a sentence.",
    "Who wrote Don Quixote, when, and what is it about? Answer in three sentences.",
    "Make a packing list for a weekend in the mountains in October.",
)
# Each some 110 tokens: a copy fills most of an answer.
_TEXTS = (
    "The harbour lies on the north side of the island, below the old lighthouse. Every morning at five the boats "
    "leave for the banks, and by noon they are back with mackerel, cod and now and then a halibut. The fish is "
    "weighed on the quay, packed in ice and sent across the sound on the two o'clock ferry. In winter the ferry runs "
    "only twice a week, and most of the catch is salted in the long grey sheds behind the church, where my "
    "grandmother worked for forty years.",
    "Dear Ms Okafor,\nthank you for your letter of 3 March about invoice 20417. You are right that the second pallet "
    "was delivered nine days late, and that two of its boxes were open. We have taken 240 euros off the sum and "
    "attach the new invoice. It is due on 30 April. If anything else is missing, please call Mr Lindqvist in our "
    "office in Malmo on weekdays before four o'clock.\nYours sincerely,\nPetra Nowak",
    "Heat the oven to 220 degrees. Cut the squash into thin slices, toss them with oil, salt and a spoon of smoked "
    "paprika, and spread them on a tray. Roast for twenty-five minutes and turn them once. Meanwhile simmer the "
    "lentils with a bay leaf until they are soft but whole, drain them, and stir in vinegar, chopped parsley and the "
    "grated rind of half a lemon. Serve warm with yoghurt and toasted seeds.",
    "A glacier is a body of ice that moves under its own weight. Snow falls, is buried, and is pressed into grains "
    "and then into solid ice. Near the bottom the ice slides over rock that meltwater has made slippery; higher up "
    "it creeps like a very slow liquid. Where it ends it leaves what it carried: boulders, gravel and fine grey "
    "flour, heaped in ridges called moraines. Old moraines show how far the ice once reached.",
    "Rules of the reading room. Coats and bags stay in the lockers by the door. Pencils only; ink is not allowed "
    "near the manuscripts. Ask the librarian for one box at a time and keep its papers in their order. Photographs "
    "may be taken without flash, for private study. Books that are wanted for the next day can stay on the reserved "
    "shelf until six in the evening. The room closes on the last Friday of every month.",
    "name,team,games,goals,assists\nAlvarez,Red,14,9,3\nBrandt,Blue,12,4,8\nChen,Red,15,11,6\nDiallo,Green,9,2,1\n"
    "Eriksen,Blue,15,7,7\nFontaine,Green,13,5,2\nGupta,Red,11,3,9\nHalloran,Blue,8,1,4\nIvanova,Green,15,12,5\n"
    "Jensen,Red,10,6,2",
    '{"id": 7731, "status": "shipped", "customer": {"name": "L. Moreau", "city": "Lyon", "country": "France"}, '
    '"items": [{"sku": "KX-20", "count": 2, "price": 14.5}, {"sku": "KX-31", "count": 1, "price": 39.0}, {"sku": '
    '"PL-08", "count": 6, "price": 2.25}], "gift": false, "notes": "leave with the neighbour"}',
    "class Account:\n    def __init__(self, owner, balance=0):\n        self.owner = owner\n        self.balance = "
    'balance\n\n    def deposit(self, amount):\n        if amount <= 0:\n            raise ValueError("amount must '
    'be positive")\n        self.balance += amount\n        return self.balance\n\n    def withdraw(self, amount):'
    '\n        if amount > self.balance:\n            raise ValueError("not enough money")\n        self.balance -= '
    "amount\n        return self.balance",
    "def merge(left, right):\n    result = []\n    i = j = 0\n    while i < len(left) and j < len(right):\n        "
    "if left[i] <= right[j]:\n            result.append(left[i])\n            i += 1\n        else:\n            "
    "result.append(right[j])\n            j += 1\n    result.extend(left[i:])\n    result.extend(right[j:])\n    "
    "return result",
    "SELECT c.name, c.city, COUNT(o.id) AS orders, SUM(o.total) AS spent\nFROM customers AS c\nLEFT JOIN orders AS o "
    "ON o.customer_id = c.id\nWHERE c.active = 1\n  AND o.placed_at >= '2023-01-01'\n  AND o.status IN ('paid', "
    "'shipped')\nGROUP BY c.name, c.city\nHAVING SUM(o.total) > 500\nORDER BY spent DESC, c.name ASC\nLIMIT 50;",
    "Monday: swimming at seven, school until three, piano with Mrs Abara.\nTuesday: school until one, dentist at "
    "two, homework, early to bed.\nWednesday: school trip to the mill; bring boots, a sandwich and a warm coat.\n"
    "Thursday: school until three, football on the upper field, dinner at Aunt Rosa's.\nFriday: school until noon, "
    "the train to Bergen leaves at 13:40 from platform two.",
    "The committee met on 12 June in the small hall. Present were Amir, Beatrice, Connor and Dalia; Elif sent her "
    "apologies. The minutes of May were approved. Connor reported that the roof will be repaired in August for at "
    "most 8,200 pounds. Beatrice asked for a second offer, which was agreed. Dalia will write to the council about "
    "the trees along Mill Lane. The next meeting is on 10 July at half past seven.",
)
_EDITS = (
    (
        "with the name total changed to amount",
        "def pay(total, rate):\n    tax = total * rate\n    total = total + tax\n    if total > 1000:\n        "
        "print('a large sum:', total)\n    else:\n        print('a small sum:', total)\n    rounded = round(total, 2)"
        "\n    return {'total': rounded, 'tax': round(tax, 2), 'rate': rate}",
    ),
    (
        "with Tuesday changed to Friday",
        "The van comes on Tuesday at eight. Please put the chairs, the folded tables and the four boxes with plates "
        "beside the gate on Monday evening. The driver has a list and will sign for each piece. If it rains, cover "
        "the boxes with the blue sheet from the shed. The keys of the hall go back to Mr Haddad before noon. On "
        "Tuesday night we count everything again and send the list of what is broken to the insurance.",
    ),
    (
        "with the second name corrected to Nguyen",
        "Ada Okoye, 12 Hill Street, Leeds, born 1984, member since 2009\nTran Nguyem, 3 Abbey Road, York, born 1991, "
        "member since 2015\nMaria Costa, 48 Dock Lane, Hull, born 1978, member since 2003\nJohn Whitby, 7 Castle "
        "Row, Durham, born 1969, member since 1999\nFatima Rahal, 21 Moor View, Ripon, born 1995, member since 2021",
    ),
    (
        "with a type added to the arguments",
        "def find_longest(words, limit):\n    longest = ''\n    for word in words:\n        if len(word) > limit:"
        "\n            continue\n        if len(word) > len(longest):\n            longest = word\n    if not "
        "longest:\n        raise LookupError('no word is short enough')\n    print('the longest word:', longest)"
        "\n    return longest",
    ),
    (
        "in which published is true",
        '{\n  "title": "Rivers of the North",\n  "author": "S. Halvorsen",\n  "pages": 312,\n  "published": false,'
        '\n  "languages": ["Norwegian", "English", "German"],\n  "chapters": [\n    "The spring",\n    "The falls",'
        '\n    "The mill",\n    "The sea"\n  ],\n  "price": {"euro": 24.9, "krone": 289}\n}',
    ),
    (
        "without spelling mistakes",
        "Last sumer we walked along the coast from the village to the cape. It took us three days, becuase the path "
        "was steep and we stopped at evry beach. We slept in a barn, in a tent and, on the last night, in a small "
        "hotel whose owner gave us soup. In the morning the fog lifted and we saw the islands, one behind the other, "
        "blue and then grey. My brother counted eleven of them and drew a map.",
    ),
    (
        "with the port changed to 9090",
        "[server]\nhost = 127.0.0.1\nport = 8080\nworkers = 4\ntimeout = 30\nkeep_alive = true\n\n[database]\nurl = "
        "postgres://app@localhost:5432/shop\npool_size = 10\nretry = 3\n\n[logging]\nlevel = info\nfile = "
        "/var/log/shop.log\nrotate = daily\nkeep = 14",
    ),
    (
        "with the prices in dollars",
        "Breakfast menu: porridge with honey 4 pounds, two eggs on toast 5 pounds, smoked salmon with cream cheese 9 "
        "pounds, pancakes with berries 7 pounds, fruit salad 4 pounds. Drinks: tea 2 pounds, coffee 3 pounds, orange "
        "juice 3 pounds, hot chocolate 3 pounds. Served from seven until eleven, on Sundays until noon. Please tell "
        "us about allergies. Children under six eat for half the price.",
    ),
)


def _copying() -> Iterator[str]:
    for text in _TEXTS:
        yield f"Text:\n{text}\n\nCopy of the text:\n"
    for change, text in _EDITS:
        yield f"Text:\n{text}\n\nThe same text {change}:\n"


COPYING = tuple(_copying())

TEMPLATES = (
    "assert add(1, 2) == 3\nassert add(2, 3) == 5\nassert add(3, 4) == 7\n",
    '<ul>\n  <li><a href="/page/1">Page 1</a></li>\n  <li><a href="/page/2">Page 2</a></li>\n',
    '[\n  {"id": 1, "name": "Anna", "age": 31},\n  {"id": 2, "name": "Ben", "age": 27},\n',
    "INSERT INTO fruit (id, name) VALUES (1, 'apple');\nINSERT INTO fruit (id, name) VALUES (2, 'banana');\n",
    "| country | capital |\n|---|---|\n| France | Paris |\n| Italy | Rome |\n",
    "Question: What is 2 + 2?\nAnswer: 4\n\nQuestion: What is 3 + 5?\nAnswer: 8\n\nQuestion:",
    "export const RED = 'red';\nexport const GREEN = 'green';\nexport const BLUE = 'blue';\n",
    "1 x 7 = 7\n2 x 7 = 14\n3 x 7 = 21\n",
    "English: dog. French: chien.\nEnglish: cat. French: chat.\nEnglish: bread. French:",
    "case 1: return 'January';\ncase 2: return 'February';\ncase 3: return 'March';\n",
    "2024-01-01 INFO server started\n2024-01-01 INFO request GET /\n2024-01-01 INFO request GET /about\n",
    "def get_name(self):\n    return self.name\n\ndef get_age(self):\n    return self.age\n\ndef get_",
    "I packed my bag and put in a book.\nI packed my bag and put in a book and a comb.\nI packed my bag and",
    ".red { color: red; }\n.green { color: green; }\n.blue { color: blue; }\n",
    "Ten green bottles hanging on the wall,\nTen green bottles hanging on the wall,\nAnd if one green bottle",
    "- Milk: 2 bottles\n- Bread: 1 loaf\n- Eggs: 12 pieces\n- ",
    'if (key === "a") { move(-1, 0); }\nif (key === "d") { move(1, 0); }\nif (key === "w")',
    "Dear Anna, thank you for the flowers. Yours, Max\nDear Ben, thank you for the book. Yours, Max\nDear",
    "self.weight = weight\nself.height = height\nself.colour = colour\n",
    "<tr><td>Monday</td><td>open</td></tr>\n<tr><td>Tuesday</td><td>open</td></tr>\n",
)
