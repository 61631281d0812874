"""Other people's clients of OpenAI's API, each against our server, in processes of their own."""
