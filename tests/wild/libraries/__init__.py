"""Models of other libraries, one file for each kind. `../other_models.py` joins them."""
