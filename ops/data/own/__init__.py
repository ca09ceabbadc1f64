"""What people bring themselves: files of texts and tables, and objects of Python that hold a data set."""
