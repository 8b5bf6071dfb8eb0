"""The inputs that come with the project, with their readers, and the checks around an input of the user's own."""
