"""The head-level scheduler: attention heads (and MLP columns) of each block shared by a device's processors.

`topology` and `backends` say what a device has, `profile` measures it, `allocation` shares the heads so that all
finish together, `find` and `recipe` learn from a model how it is cut, `split` runs it, `auto` ties them together.
Nothing heavy is imported here.
"""
