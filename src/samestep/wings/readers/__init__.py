"""The wing `readers`: samples from files beyond arrays and plain text: JSON lines, Parquet, saved data sets, conversations and images.

rows.py            rows of JSON lines, Parquet files and data sets that were saved with save_to_disk
documents.py       texts and conversations, packed into samples of one length
conversations.py   messages of a row, whichever of the usual forms they have; chat.py, their tokens by a template
images.py          a folder of images, one folder a class
"""
