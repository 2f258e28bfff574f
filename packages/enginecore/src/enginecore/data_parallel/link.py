class FrontendLink:
    pass
