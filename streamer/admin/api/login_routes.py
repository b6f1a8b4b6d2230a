"""Routes of sessions, and the cookies of sessions."""

from typing import Any

from fastapi import APIRouter, Request, Response

from streamer.admin.mapping import api_models
from streamer.admin.service.access import COOKIE, CSRF_COOKIE, Access, LoginSession, UserIdentity


def add_sessions(router: APIRouter, access: Access) -> None:
    """Add login, logout and the session."""

    @router.post("/login", tags=["session"], response_model=api_models.WhoAmI)
    async def log_in(request: Request, response: Response, values: api_models.Login) -> Any:
        """Begin a session, which lives in a cookie."""
        cookie, session = await access.log_in(request, values.name, values.password)
        set_cookies(request, response, cookie, session)
        return {"name": session.name, "role": session.role, "csrf": session.csrf}

    @router.post("/logout", tags=["session"], status_code=204, response_class=Response)
    async def log_out(request: Request) -> Response:
        """End the session."""
        access.log_out(request)
        response = Response(status_code=204)
        delete_cookies(request, response)
        return response

    @router.get("/session", tags=["session"], response_model=api_models.WhoAmI)
    async def get_session(request: Request) -> Any:
        """Return the user behind the request."""
        identity: UserIdentity = request.state.identity
        csrf = identity.session.csrf if identity.session is not None else None
        return {"name": identity.name, "role": identity.role, "csrf": csrf}


def set_cookies(request: Request, response: Response, cookie: str, session: LoginSession) -> None:
    """Set the cookies of the session and of the CSRF token."""
    # uvicorn uses X-Forwarded-Proto only from a trusted proxy.
    secure = request.url.scheme == "https"
    response.set_cookie(COOKIE, cookie, httponly=True, samesite="strict", secure=secure)
    response.set_cookie(CSRF_COOKIE, session.csrf, samesite="strict", secure=secure)


def delete_cookies(request: Request, response: Response) -> None:
    """Remove the cookies of `set_cookies` from a browser."""
    for name in (COOKIE, CSRF_COOKIE):
        response.delete_cookie(name, samesite="strict", secure=request.url.scheme == "https")
