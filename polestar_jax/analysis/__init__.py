"""What a decode does inside, as data and as figures."""
