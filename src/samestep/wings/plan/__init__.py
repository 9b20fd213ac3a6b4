"""The wing `plan`: which layout is the fastest that fits, and what a step of it takes, without running it. No torch but in `measurement/`.

simulation/     seconds, bytes and a timeline of one step, from its program        `samestep simulate`
bounds/         the least that a step can take, so that a search ends early
search.py       every candidate, what throws it out, and the ranking               `samestep plan`
measurement/    this machine's hardware profile                                    `samestep measure`
calibrate.py    a profile refitted to measured steps                               `samestep calibrate`
recipes/        a layout in the words of another framework                         `samestep plan --to`
"""
