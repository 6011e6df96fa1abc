"""Real English prompts of mixed kind and length, written for this project.

Thirty-two requests such as people send to an assistant, from a handful of words to about three
hundred: throughput on prompts that are all alike says little about serving. They are in the
public domain as far as the authors can make them so.
"""

from __future__ import annotations

PROMPTS: tuple[str, ...] = (
    "Name three primary colours, please.",
    "What is the capital of Australia?",
    "Translate 'good morning' into Spanish and French.",
    "Why is the sky blue during the day and red at sunset?",
    "Give me a simple recipe for pancakes that needs no scales.",
    "List five animals that sleep through the winter, with one sentence on how each prepares.",
    "Explain in two sentences what a hash function does and why two inputs can collide.",
    "Write a short, friendly e-mail that asks a colleague to move our meeting from Tuesday "
    "morning to Thursday afternoon.",
    "What is the difference between weather and climate? Answer so that a ten-year-old "
    "understands it, and give one example of each.",
    "I have flour, eggs, two tomatoes, half an onion and some hard cheese. What can I cook for "
    "two people in half an hour without going to the shop?",
    "Write a Python function that takes a list of integers and returns the longest run of "
    "strictly increasing neighbours. Include a docstring and two examples.",
    "Summarise the plot of Romeo and Juliet in exactly four sentences, without naming any of the "
    "characters, so that the story could take place in any city at any time.",
    "My bicycle makes a clicking noise once per turn of the pedals, only when I push hard and "
    "never when I coast. List the likely causes from the most to the least probable, and say how "
    "I can test for each at home.",
    "A train leaves at 9:40 and covers 126 kilometres at an average of 84 kilometres an hour. It "
    "then waits twelve minutes and continues for 45 minutes at 96 kilometres an hour. When does "
    "it arrive, and how far has it gone? Show each step of the calculation.",
    "Compare a heat pump with a gas boiler for a badly insulated house built in the nineteen "
    "thirties. Consider the price of installation, the running cost over fifteen years, noise, "
    "space, and what would have to be done to the radiators first. End with a recommendation.",
    "Continue this story in the same tone for three paragraphs: The lighthouse keeper had counted "
    "ships for thirty-one years, and in all that time the number at dusk had never once been "
    "smaller than the number at dawn. Tonight, for the first time, one was missing.",
    "Rewrite the following sentence in plain English for a notice on a door: Owing to the "
    "commencement of remedial works pertaining to the vertical transportation apparatus, "
    "occupants are hereby requested to avail themselves of the alternative means of ascent until "
    "such time as the said works have been concluded.",
    "You are the host of a quiz about the history of computing. Write six questions of rising "
    "difficulty, each with four possible answers of which exactly one is right. Mark the right "
    "answer, and add one sentence on why each of the wrong ones sounds plausible. Do not ask about "
    "companies that are less than twenty years old.",
    "Here is a short meeting note. Turn it into a list of tasks with a name and a date for each. "
    "Anna will ask the landlord about the broken window before Friday. The budget for the summer "
    "party is still open; Tomas wants to send a proposal by the tenth. Everybody should enter "
    "their holidays in the calendar this week. The printer is Mei's problem now, she says, but "
    "not before the first of next month.",
    "A friend claims that since a coin has landed on heads seven times in a row, tails must be "
    "more likely on the next throw. Another friend says that, on the contrary, the coin is "
    "probably bent and heads is more likely. Explain who is right and under which assumptions, "
    "and show with a short calculation how much seven heads should change our mind if one coin in "
    "a thousand has two heads.",
    "Review this SQL query and point out everything that could be wrong or slow about it: select "
    "* from orders o, customers c where o.customer = c.id and year(o.created) = 2024 and c.city "
    "like '%burg' order by o.total desc limit 10 offset 100000; The table of orders has forty "
    "million rows, an index on created and one on customer. Then write a better version, and "
    "name the index that you would add.",
    "Write the opening speech for a village library that reopens after a flood. It should last "
    "about two minutes when read aloud. Thank the volunteers who carried eleven thousand books up "
    "to the attic of the school in one night, mention the baker who fed them, make one gentle "
    "joke about overdue loans, and end by inviting the children to choose the first book that "
    "goes back on the shelves.",
    "Explain how a refrigerator moves heat from a cold place to a warm one although heat by "
    "itself flows the other way. Start with the everyday observation that sweat cools the skin, "
    "then introduce evaporation and condensation, then pressure, and only then the four parts of "
    "the machine: compressor, condenser, expansion valve and evaporator. Avoid formulas. Close "
    "with a paragraph on why the back of the appliance is warm and why leaving its door open "
    "will not cool the kitchen.",
    "I am planning a walk of five days along a river with two children of eight and eleven, one "
    "small tent, and a dog that is afraid of bridges. We can walk about twelve kilometres a day. "
    "There is a railway line on the left bank with a station every fifteen kilometres or so, and "
    "shops only in the larger villages. Draw up a plan with stages, rest, meals that need one "
    "pot, what to do when it rains for a whole day, and a packing list that fits into two large "
    "rucksacks and two small ones. Say which decisions you would leave to the children.",
    "Below are three customer reviews of the same coffee grinder. Summarise what they agree on, "
    "what they disagree on, and which question you would ask each reviewer to find out why. "
    "First: it is quiet, quick, and the steps are fine enough for espresso, but after four months "
    "the lid no longer closes. Second: far too loud for a small flat, though the coffee tastes "
    "better than anything I made before; the lid is a little loose. Third: I bought two of them, "
    "one for the office; the one at home is quiet, the other one screams, and both have lids that "
    "feel as if they belonged to another machine.",
    "Act as an experienced editor. The following paragraph is the beginning of a popular science "
    "book. Tell me what works, what does not, and give me your own version of no more than one "
    "hundred words. Bees, which are insects, and which have been kept by humans for many "
    "thousands of years in many different parts of the world, are able to do a thing which is "
    "really quite amazing, which is that they are able to tell each other where the flowers are. "
    "They do this, as was discovered in the twentieth century by a scientist, by dancing. The "
    "dance is in the shape of an eight. The direction of the dance is important, and the length "
    "of it is also important, as we will see later on in this book.",
    "A small hospital wants to know whether a new checklist has made operations safer. In the year "
    "before it was introduced there were 2,140 operations with 47 complications; in the year "
    "after, 2,310 operations with 38. The chief surgeon says that this proves the checklist works. "
    "The head nurse remarks that two surgeons who took the hardest cases have retired in between. "
    "The accountant notes that complications are now recorded by a different department. Compute "
    "the two rates and the difference between them, estimate whether chance alone could explain "
    "it, then discuss what each of the three people has got right, and propose a study that could "
    "be done next year with little money and would settle the matter better.",
    "Write a dialogue between a clockmaker and her apprentice in which the apprentice learns why "
    "a pendulum clock runs slow in summer. The apprentice should first guess wrongly, twice, and "
    "each guess should be refuted by an observation that can be made in the workshop rather than "
    "by authority. The clockmaker is patient but a little deaf, which leads to one "
    "misunderstanding that turns out to be useful. Include the length of the pendulum, a rough "
    "figure for how much a metal rod grows when it gets ten degrees warmer, and the number of "
    "seconds a day that this makes, so that a reader could check the sum. Do not use the words "
    "thermal, coefficient or expansion. The dialogue ends with the apprentice proposing a "
    "remedy that really was used in old clocks, and with the clockmaker pretending never to have "
    "heard of it.",
    "We run a night train between two large cities and receive many complaints, of which these "
    "are typical. The heating in coach seven cannot be turned down. The steward woke everybody at "
    "four because of a passport check that then did not take place. The shower on the deluxe deck "
    "had no water, and nobody could say who might be responsible. A bicycle that had been paid for "
    "was left behind on the platform. Breakfast was excellent, but it came an hour after the "
    "passenger had got off. Group the complaints by their cause, not by their topic; say for each "
    "group whether it is a matter of equipment, of information, or of authority; and propose one "
    "measure for each that costs nothing, one that costs a little, and one that needs an "
    "investment. Then write the reply to the passenger with the bicycle. It should admit the "
    "fault in its first sentence, say what happens next and by when, offer something that is of "
    "real use to a person without a bicycle in a strange city, and contain neither the word "
    "unfortunately nor the word inconvenience.",
    "Read the description of a board game and answer the questions after it. The board is a ring "
    "of twenty-four fields. Every player has four stones, which start outside. On your turn you "
    "throw two dice and may use each of them for a different stone, or their sum for one stone. A "
    "stone enters on the field whose number is thrown, one to six, or the sum, up to twelve. A "
    "stone that ends its move on a field with exactly one stone of another player sends that stone "
    "back outside. A field with two stones of one player is closed to all others, who may pass but "
    "not stop there. A stone leaves the ring when it has gone all the way round and reaches or "
    "passes the field on which it entered. The first player without stones on the board and "
    "outside wins. Questions: Can a stone be sent back by a move that uses only one of the dice? "
    "What is the smallest number of turns in which a player can win if nobody else moves? Is it "
    "ever better to use the sum than the two numbers one by one? The rules leave at least three "
    "situations undecided; name them and suggest a rule for each, in the style of the text. "
    "Finally, write a hint for beginners in no more than fifty words.",
    "You are helping a town of nine thousand people to decide what to do with its old public "
    "swimming pool. The building is from 1968; the roof leaks, the filters are from the last "
    "century, and heating takes a fifth of all the energy that the town pays for. A survey says "
    "that four hundred people swim there every week, most of them pupils of the two schools and "
    "members of a club for people over sixty. The nearest other pool is twenty-six kilometres "
    "away and cannot be reached by bus after five o'clock. Three proposals lie on the table. The "
    "first is to repair the roof and the filters for about two million and to hope for the best. "
    "The second is to build a smaller, well-insulated pool for nine million, of which the state "
    "might pay half, with a decision in two years. The third is to close the pool, to give every "
    "child a free ticket for the other one, and to run a bus. The mayor wants a paper of one page "
    "that a busy council member can read in three minutes. Write it. Begin with the question that "
    "is to be decided; then give the facts that speak for and against each proposal, fairly, with "
    "figures where there are any and with an honest word where there are none. Name what would "
    "have to be found out before the vote and who could find it out in four weeks. Do not "
    "recommend anything, but make clear what each choice says about what the town cares for.",
    "I would like you to play the part of a careful mechanic of arguments. I shall give you a "
    "chain of reasoning; take it apart, show me each link, and tell me which of them would hold "
    "if one pulled on it. Here is the chain. People who read for pleasure as children earn more "
    "as adults. So reading makes people earn more. Libraries lend books for nothing, and the "
    "number of books that children borrow has fallen by a third in ten years. Thus the children "
    "of today will earn less than their parents. Earning less, they will pay less tax, and the "
    "state will have less money for libraries, which will lend even fewer books. The decline "
    "therefore feeds itself and can only be stopped from outside. The cheapest way to stop it is "
    "to pay children for every book that they read, since a book costs the library twelve and the "
    "child would do it for two. A trial in one school has shown that it works: children who were "
    "paid borrowed four times as many books as before. For every link, say whether it is an "
    "observation, a definition, a guess about causes, or a piece of arithmetic. For every guess "
    "about causes, name at least one other explanation that fits the same observation and one "
    "fact that would tell the two apart. Point out where a word changes its meaning along the "
    "way; there are at least two such words. Then build the strongest version of the argument "
    "that you honestly can, using only the links that held, and say in one closing sentence how "
    "much of the original conclusion is left standing and what you would want to know next.",
)
