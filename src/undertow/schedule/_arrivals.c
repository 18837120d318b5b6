/* SPDX-License-Identifier: Apache-2.0

The hook of every parameter. With thousands of small parameters it is the largest cost of a step. `PythonHook` in tracker.py does
the same: it is the reference, and is used if this file is not compiled. */

#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stddef.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    PyObject *arrivals;  /* of all buckets */
    PyObject *seen;      /* list: parameters, in the order of their arrivals */
    Py_ssize_t looks_at; /* from how many arrivals on they are looked at */
} Hook;

static PyObject *arrive(PyObject *self, PyObject *param) {
    Hook *hook = (Hook *)self;
    if (hook->seen == NULL || hook->arrivals == NULL) /* the garbage collector has cleared it */
        Py_RETURN_NONE;
    if (PyList_Append(hook->seen, param) < 0)
        return NULL;
    if (PyList_Size(hook->seen) >= hook->looks_at) {
        PyObject *looked = PyObject_CallMethod(hook->arrivals, "look", "O(O)", param, self);
        if (looked == NULL)
            return NULL;
        Py_DECREF(looked);
    }
    Py_RETURN_NONE;
}

static int init(PyObject *self, PyObject *args, PyObject *kwargs) {
    Hook *hook = (Hook *)self;
    PyObject *arrivals, *seen;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Hook", (char *[]){"arrivals", NULL}, &arrivals))
        return -1;
    if (hook->seen != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "Hook.__init__() was called before");
        return -1;
    }
    if ((seen = PyList_New(0)) == NULL)
        return -1;
    hook->arrivals = Py_NewRef(arrivals);
    hook->seen = seen;
    return 0;
}

static int traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Hook *)self)->arrivals);
    Py_VISIT(((Hook *)self)->seen);
    return 0;
}

static int clear(PyObject *self) {
    Py_CLEAR(((Hook *)self)->arrivals);
    Py_CLEAR(((Hook *)self)->seen);
    return 0;
}

static void dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {{"arrive", arrive, METH_O, "The hook of every parameter that is in no other bucket."}, {NULL}};

static PyMemberDef members[] = {
    {"arrivals", T_OBJECT_EX, offsetof(Hook, arrivals), READONLY},
    {"seen", T_OBJECT_EX, offsetof(Hook, seen), READONLY},
    {"looks_at", T_PYSSIZET, offsetof(Hook, looks_at), 0},
    {NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Lists the arrivals of one bucket, and looks at them when it may be full."},
    {Py_tp_init, init},         {Py_tp_traverse, traverse}, {Py_tp_clear, clear},
    {Py_tp_dealloc, dealloc},   {Py_tp_methods, methods},   {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec spec = {
    "undertow.schedule._arrivals.Hook", sizeof(Hook), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};

static int execute(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    int done = type == NULL ? -1 : PyModule_AddObjectRef(module, "Hook", type);
    Py_XDECREF(type);
    return done;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_arrivals", NULL, 0, NULL, module_slots};

PyMODINIT_FUNC PyInit__arrivals(void) { return PyModuleDef_Init(&module); }
