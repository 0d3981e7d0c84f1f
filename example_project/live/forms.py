from django import forms

from example_project.live.models import Note


class NoteForm(forms.ModelForm):
    class Meta:
        model = Note
        fields = ("text",)
        widgets = {"text": forms.TextInput({"autocomplete": "off"})}
