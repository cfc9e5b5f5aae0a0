"""Forty invented facts: a document that states one, a question, a word of its answer.

The names are invented, so that a model can know an answer from its document only.
"""

from __future__ import annotations

FACTS = [
    (
        "The bakery of Velmora opens at six in the morning. It sells rye bread.",
        "When does the bakery of Velmora open?",
        "six",
    ),
    (
        "The code word of the library in Tarnhall is marzipan.",
        "What is the code word of the library in Tarnhall?",
        "marzipan",
    ),
    (
        "Captain Orlune sails a ship called the Grey Heron.",
        "What is the name of Captain Orlune's ship?",
        "heron",
    ),
    (
        "The Quill Museum in Dorvas keeps a blue umbrella in its main hall.",
        "What does the Quill Museum keep in its main hall?",
        "umbrella",
    ),
    (
        "Professor Ilka Brandt studies the sleep of hedgehogs.",
        "Which animal does Professor Ilka Brandt study?",
        "hedgehog",
    ),
    (
        "The train from Mossby to Arkwell takes forty minutes.",
        "How long does the train from Mossby to Arkwell take?",
        "forty",
    ),
    (
        "The mayor of Penvale is called Sigrid Holm. She was elected in spring.",
        "What is the name of the mayor of Penvale?",
        "sigrid",
    ),
    (
        "The flag of the Ostrel Islands is orange with a white star.",
        "What colour is the flag of the Ostrel Islands?",
        "orange",
    ),
    (
        "The river Lunder ends in Lake Marwen.",
        "In which lake does the river Lunder end?",
        "marwen",
    ),
    (
        "The Zorbel phone has a battery that lasts nine days.",
        "How many days does the battery of the Zorbel phone last?",
        "nine",
    ),
    (
        "Chef Ponti puts cinnamon into his tomato soup.",
        "What does Chef Ponti put into his tomato soup?",
        "cinnamon",
    ),
    (
        "The dog of the Farrow family is called Biscuit.",
        "What is the dog of the Farrow family called?",
        "biscuit",
    ),
    (
        "The Nimbus tower in Kelport has 73 floors.",
        "How many floors does the Nimbus tower have?",
        "73",
    ),
    (
        "The painter Odo Reyl only uses green paint.",
        "Which colour of paint does Odo Reyl use?",
        "green",
    ),
    (
        "The bridge at Hollin was built from glass in one summer.",
        "What was the bridge at Hollin built from?",
        "glass",
    ),
    (
        "The school of Wick Hill teaches Finnish as its first language.",
        "Which language does the school of Wick Hill teach first?",
        "finnish",
    ),
    (
        "The Amber Cup was won by the team from Sundry.",
        "Which team won the Amber Cup?",
        "sundry",
    ),
    (
        "Doctor Vex keeps her keys under a flower pot.",
        "Where does Doctor Vex keep her keys?",
        "pot",
    ),
    (
        "The old mill of Grell burned down in 1874.",
        "In which year did the old mill of Grell burn down?",
        "1874",
    ),
    (
        "The singer Lana Mott was born in the town of Pirrin.",
        "In which town was the singer Lana Mott born?",
        "pirrin",
    ),
    (
        "The password of the garden gate at Elmsford is seven owls.",
        "What is the password of the garden gate at Elmsford?",
        "owls",
    ),
    (
        "The company Trevane makes wooden spoons.",
        "What does the company Trevane make?",
        "spoon",
    ),
    (
        "A ticket for the Dunmere ferry costs twelve crowns.",
        "How much does a ticket for the Dunmere ferry cost?",
        "twelve",
    ),
    (
        "The favourite game of King Aldus was chess.",
        "What was the favourite game of King Aldus?",
        "chess",
    ),
    (
        "The comet Rask was found by a student called Mira Tole.",
        "Who found the comet Rask?",
        "mira",
    ),
    (
        "The cave of Sornel is full of white bats.",
        "Which animals is the cave of Sornel full of?",
        "bat",
    ),
    (
        "The Corbin hotel has a swimming pool on its roof.",
        "What does the Corbin hotel have on its roof?",
        "pool",
    ),
    (
        "The farmer Jost Able grows purple carrots.",
        "What does the farmer Jost Able grow?",
        "carrot",
    ),
    (
        "The island of Tulley has only one tree, a cedar.",
        "Which tree is on the island of Tulley?",
        "cedar",
    ),
    (
        "The clock of Brannock castle is always eleven minutes late.",
        "How many minutes is the clock of Brannock castle late?",
        "eleven",
    ),
    (
        "The poet Una Sarl wrote her poems on napkins.",
        "On what did the poet Una Sarl write her poems?",
        "napkin",
    ),
    (
        "The airline Vantos flies to Lisbon on Mondays.",
        "To which city does the airline Vantos fly?",
        "lisbon",
    ),
    (
        "The Harrow club meets every Thursday in a cellar.",
        "On which day does the Harrow club meet?",
        "thursday",
    ),
    (
        "The robot Kip was built to fold shirts.",
        "What was the robot Kip built to do?",
        "shirt",
    ),
    (
        "The village of Oxley is famous for its honey.",
        "What is the village of Oxley famous for?",
        "honey",
    ),
    (
        "The general Ruark lost the battle of Thistle Field because of fog.",
        "Why did the general Ruark lose the battle of Thistle Field?",
        "fog",
    ),
    (
        "The metal dralium melts at 412 degrees.",
        "At how many degrees does the metal dralium melt?",
        "412",
    ),
    (
        "The actor Piet Lorn plays a gardener in the film Red Door.",
        "Whom does the actor Piet Lorn play in the film Red Door?",
        "gardener",
    ),
    (
        "The well of Saint Orla is thirty metres deep.",
        "How deep is the well of Saint Orla?",
        "thirty",
    ),
    (
        "The baker Tom Hask has a parrot that speaks Dutch.",
        "Which animal does the baker Tom Hask have?",
        "parrot",
    ),
]
