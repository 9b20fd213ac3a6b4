"""Lower bounds on a layout's memory and step time, so that a search plays few of its candidates on the clock."""
