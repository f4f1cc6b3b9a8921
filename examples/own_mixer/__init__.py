"""Two mixers of one's own, and a recipe that trains a model of them (``recipe.py``)."""
