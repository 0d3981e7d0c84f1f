from django_pgqueue import Topic

notes = Topic("live.notes")
