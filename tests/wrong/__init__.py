"""Wrong solutions of the exercises, as learners write them.

Each function is wrong; its docstring is a part of the sentence that the grade must say.
"""
