"""Built-in networks, a family a file; each holds its `MODEL`, or several.

Names, sizes and order of layers are those of torchvision and Hugging Face.
"""
